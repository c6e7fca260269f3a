#include "buffer_pool.hpp"

#include "bindings.hpp"

namespace py = pybind11;

namespace lmcache_fast {
namespace {

std::size_t checked_bytes(const char* what, std::int64_t bytes) {
    if (bytes < 0) {
        throw py::value_error(std::string(what) + " is " + std::to_string(bytes) +
                              "; expected 0 or more bytes");
    }
    return static_cast<std::size_t>(bytes);
}

}  // namespace

void register_buffer_pool(py::module_& module) {
    py::class_<Buffer>(module, "Buffer", py::buffer_protocol())
        .def_buffer([](Buffer& self) {
            return py::buffer_info(reinterpret_cast<std::uint8_t*>(self.data()),
                                   static_cast<py::ssize_t>(self.size()), false);
        })
        .def("__len__", &Buffer::size);

    py::class_<BufferPool, std::shared_ptr<BufferPool>>(module, "BufferPool")
        .def(py::init([](std::int64_t limit) {
                 return std::make_shared<BufferPool>(
                     checked_bytes("BufferPool: limit_bytes", limit));
             }),
             py::arg("limit_bytes"))
        .def(
            "take",
            [](BufferPool& self, std::int64_t bytes) {
                return self.take(checked_bytes("BufferPool.take: nbytes", bytes));
            },
            py::arg("nbytes"))
        .def("clear", &BufferPool::clear)
        .def_property_readonly("held_bytes", &BufferPool::held_bytes);
}

}  // namespace lmcache_fast
