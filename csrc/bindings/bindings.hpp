// One register_* per concept, and how arguments come in.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <string>

namespace lmcache_fast {

void register_shared_region(pybind11::module_& module);
void register_chunked_side(pybind11::module_& module);
void register_rotation(pybind11::module_& module);
void register_run_copy(pybind11::module_& module);
void register_buffer_pool(pybind11::module_& module);
void register_scores(pybind11::module_& module);

/// `values` (any array-like of integers) as a C-contiguous array of T.
template <typename T>
pybind11::array_t<T, pybind11::array::c_style> integers(const char* name,
                                                        const pybind11::object& values) {
    const auto array = pybind11::array::ensure(values);
    if (!array) throw pybind11::error_already_set();
    const char kind = array.dtype().kind();
    if (kind != 'i' && kind != 'u' && array.size() > 0) {
        throw pybind11::type_error(std::string(name) + " has dtype kind '" + kind +
                                   "'; expected integers");
    }
    return pybind11::array_t<T, pybind11::array::c_style | pybind11::array::forcecast>(array);
}

}  // namespace lmcache_fast
