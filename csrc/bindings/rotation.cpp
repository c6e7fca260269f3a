#include "rotation.hpp"

#include <vector>

#include "bindings.hpp"

namespace py = pybind11;

namespace lmcache_fast {
namespace {

using Table = py::array_t<float, py::array::c_style | py::array::forcecast>;

std::unique_ptr<Rotation> make_rotation(const Table& cos, const Table& sin,
                                        const py::object& run_rows, std::int64_t row_step,
                                        std::int64_t num_heads, std::int64_t head_dim,
                                        std::int64_t rotary_dim, bool interleaved,
                                        const std::string& dtype, std::int64_t rotary_offset) {
    if (cos.ndim() != 2 || sin.ndim() != 2 || cos.shape(0) != sin.shape(0) ||
        cos.shape(1) != sin.shape(1)) {
        throw py::value_error("Rotation: cos and sin must both be [rows, rotary_dim / 2]");
    }
    const auto rows = integers<std::int32_t>("Rotation: run_rows", run_rows);
    // What is not rotated before the rotated part counts as no part of the head.
    const HeadShape heads{num_heads, head_dim - rotary_offset, rotary_dim, interleaved,
                          parse_element(dtype)};
    return std::make_unique<Rotation>(
        std::vector<float>(cos.data(), cos.data() + cos.size()),
        std::vector<float>(sin.data(), sin.data() + sin.size()), cos.shape(0),
        std::vector<std::int32_t>(rows.data(), rows.data() + rows.size()), row_step, heads,
        rotary_offset);
}

}  // namespace

void register_rotation(py::module_& module) {
    py::class_<Rotation>(module, "Rotation")
        .def(py::init(&make_rotation), py::arg("cos"), py::arg("sin"), py::arg("run_rows"),
             py::arg("row_step"), py::kw_only(), py::arg("num_heads"), py::arg("head_dim"),
             py::arg("rotary_dim"), py::arg("interleaved"), py::arg("dtype"),
             py::arg("rotary_offset") = 0);
}

}  // namespace lmcache_fast
