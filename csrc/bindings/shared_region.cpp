#include "shared_region.hpp"

#include <system_error>

#include "bindings.hpp"

namespace py = pybind11;

namespace lmcache_fast {
namespace {

/// What a memoryview of a region holds on to.
struct RegionView {
    std::shared_ptr<Mapping> mapping;
    std::byte* address;
    std::uint64_t length;
    bool writable;
};

py::memoryview view(const SharedRegion& region, std::uint64_t offset, std::uint64_t length,
                    bool writable) {
    const auto& mapping = region.mapping();
    mapping->check_slot(offset, length);
    const py::object owner =
        py::cast(RegionView{mapping, mapping->address() + offset, length, writable});
    PyObject* made = PyMemoryView_FromObject(owner.ptr());
    if (made == nullptr) throw py::error_already_set();
    return py::reinterpret_steal<py::memoryview>(made);
}

}  // namespace

void register_shared_region(py::module_& module) {
    py::register_local_exception_translator([](std::exception_ptr error) {
        try {
            if (error) std::rethrow_exception(error);
        } catch (const std::system_error& system) {
            const py::tuple arguments = py::make_tuple(system.code().value(), system.what());
            PyErr_SetObject(PyExc_OSError, arguments.ptr());
        }
    });

    py::class_<RegionView>(module, "_RegionView", py::buffer_protocol())
        .def_buffer([](RegionView& self) {
            return py::buffer_info(reinterpret_cast<std::uint8_t*>(self.address),
                                   static_cast<py::ssize_t>(self.length), !self.writable);
        });

    py::class_<SharedRegion>(module, "SharedRegion")
        .def(py::init<const std::string&, std::int64_t>(), py::arg("name"), py::arg("size"))
        .def_property_readonly("name", &SharedRegion::name)
        .def_property_readonly("size",
                               [](const SharedRegion& self) { return self.mapping()->size(); })
        .def_property_readonly(
            "address",
            [](const SharedRegion& self) {
                return reinterpret_cast<std::uintptr_t>(self.mapping()->address());
            })
        .def_property_readonly("is_intact",
                               [](const SharedRegion& self) { return self.mapping()->is_intact(); })
        .def(
            "check_slot",
            [](const SharedRegion& self, std::uint64_t offset, std::uint64_t length,
               std::uint64_t alignment) { self.mapping()->check_slot(offset, length, alignment); },
            py::arg("offset"), py::arg("length"), py::arg("alignment") = 1)
        .def("view", &view, py::arg("offset"), py::arg("length"), py::arg("writable") = false)
        .def(
            "populate",
            [](const SharedRegion& self, const py::object& offsets, std::uint64_t length) {
                const auto slots = integers<std::uint64_t>("populate: offsets", offsets);
                const std::shared_ptr<Mapping> mapping = self.mapping();
                const py::gil_scoped_release unlocked;
                mapping->populate(slots.data(), static_cast<std::size_t>(slots.size()), length);
            },
            py::arg("offsets"), py::arg("length"))
        .def("close", &SharedRegion::close);
}

}  // namespace lmcache_fast
