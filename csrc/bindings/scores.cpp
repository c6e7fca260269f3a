#include "scores.hpp"

#include "bindings.hpp"
#include "rotation.hpp"

namespace py = pybind11;

namespace lmcache_fast {
namespace {

Scoring scoring(const ChunkedSide& side, std::int64_t head_dim, const std::string& dtype,
                const std::string& reduce, int num_threads) {
    if (reduce != "mean" && reduce != "max") {
        throw py::value_error("scores: reduce is '" + reduce + "'; expected mean or max");
    }
    if (num_threads < 0) {
        throw py::value_error("scores: num_threads is " + std::to_string(num_threads) +
                              "; expected 0 (the default) or more");
    }
    return {side, parse_element(dtype), head_dim, reduce == "max" ? Reduce::kMax : Reduce::kMean,
            static_cast<unsigned>(num_threads)};
}

/// Scores [layers, tokens], 0 where `write` leaves them out.
template <typename Write>
py::array_t<double> scores(const ChunkedSide& side, const Write& write) {
    // Zeros that the system provides when they are written to: by the threads that score.
    const auto zeros = py::module_::import("numpy").attr("zeros");
    py::array_t<double> result = zeros(py::make_tuple(side.shape().layers, side.num_tokens()));
    double* const out = result.mutable_data();
    const py::gil_scoped_release unlocked;
    write(out);
    return result;
}

py::array_t<double> knorm(const ChunkedSide& side, std::int64_t head_dim, const std::string& dtype,
                          const std::string& reduce, int num_threads) {
    const Scoring how = scoring(side, head_dim, dtype, reduce, num_threads);
    return scores(side, [&](double* out) { knorm_scores(how, out); });
}

py::array_t<double> keydiff(const ChunkedSide& side, std::int64_t head_dim,
                            const std::string& dtype, const std::string& reduce, int num_threads) {
    const Scoring how = scoring(side, head_dim, dtype, reduce, num_threads);
    return scores(side, [&](double* out) { keydiff_scores(how, out); });
}

py::array_t<double> lagkv(const ChunkedSide& side, std::int64_t num_sink, std::int64_t lag_size,
                          bool cross_scoring, std::int64_t head_dim, const std::string& dtype,
                          const std::string& reduce, int num_threads) {
    const Scoring how = scoring(side, head_dim, dtype, reduce, num_threads);
    return scores(side,
                  [&](double* out) { lagkv_scores(how, num_sink, lag_size, cross_scoring, out); });
}

py::array_t<double> attention(const ChunkedSide& side,
                              const py::array_t<float, py::array::c_style>& queries,
                              std::int64_t kernel_size, std::int64_t head_dim,
                              const std::string& dtype, const std::string& reduce,
                              int num_threads) {
    const Scoring how = scoring(side, head_dim, dtype, reduce, num_threads);
    if (queries.ndim() != 4 || queries.shape(0) != side.shape().layers ||
        queries.shape(3) != head_dim) {
        throw py::value_error(
            "scores: queries must be [layers, query heads, window, head_dim] = [" +
            std::to_string(side.shape().layers) + ", ., ., " + std::to_string(head_dim) + "]");
    }
    return scores(side, [&](double* out) {
        attention_scores(how, queries.data(), queries.shape(1), queries.shape(2), kernel_size, out);
    });
}

}  // namespace

void register_scores(py::module_& module) {
    const auto head_dim = py::arg("head_dim");
    const auto dtype = py::arg("dtype");
    const auto reduce = py::arg("reduce");
    const auto num_threads = py::arg("num_threads") = 0;
    module.def("knorm_scores", &knorm, py::arg("side"), py::kw_only(), head_dim, dtype, reduce,
               num_threads);
    module.def("keydiff_scores", &keydiff, py::arg("side"), py::kw_only(), head_dim, dtype, reduce,
               num_threads);
    module.def("lagkv_scores", &lagkv, py::arg("side"), py::kw_only(), py::arg("num_sink"),
               py::arg("lag_size"), py::arg("cross_scoring"), head_dim, dtype, reduce, num_threads);
    module.def("attention_scores", &attention, py::arg("side"), py::arg("queries"), py::kw_only(),
               py::arg("kernel_size"), head_dim, dtype, reduce, num_threads);
}

}  // namespace lmcache_fast
