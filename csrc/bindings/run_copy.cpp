#include "run_copy.hpp"

#include "bindings.hpp"
#include "kernels/kernels.hpp"
#include "thread_pool.hpp"

namespace py = pybind11;

namespace lmcache_fast {
namespace {

static_assert(sizeof(Run) == 3 * sizeof(std::int64_t), "a row of the runs array");

void copy(const ChunkedSide& source, const ChunkedSide& target, const py::object& runs,
          const Rotation* rotation, int num_threads) {
    const auto rows = integers<std::int64_t>("copy_runs: runs", runs);
    if (rows.ndim() != 2 || rows.shape(1) != 3) {
        throw py::value_error("copy_runs: runs must be [n, 3]: source_token, target_token, count");
    }
    if (num_threads < 0) {
        throw py::value_error("copy_runs: num_threads is " + std::to_string(num_threads) +
                              "; expected 0 (the default) or more");
    }
    const py::gil_scoped_release unlocked;
    copy_runs(source, target, reinterpret_cast<const Run*>(rows.data()),
              static_cast<std::size_t>(rows.shape(0)), rotation,
              static_cast<unsigned>(num_threads));
}

py::list kernels() {
    std::size_t count = 0;
    const Kernels* const* sets = supported_kernels(count);
    py::list names;
    for (std::size_t i = 0; i < count; ++i) names.append(sets[i]->name);
    return names;
}

void choose_kernel(const std::string& name) {
    if (!set_kernels(name.c_str())) {
        throw py::value_error("set_kernel: name is '" + name +
                              "'; expected one of kernels() on this processor");
    }
}

}  // namespace

void register_run_copy(py::module_& module) {
    module.def("copy_runs", &copy, py::arg("source"), py::arg("target"), py::arg("runs"),
               py::arg("rotation") = py::none(), py::arg("num_threads") = 0);
    module.def("num_threads", &default_num_threads);
    module.def("kernel_name", [] { return active_kernels().name; });
    module.def("set_kernel", &choose_kernel, py::arg("name"));
    module.def("kernels", &kernels);
}

}  // namespace lmcache_fast
