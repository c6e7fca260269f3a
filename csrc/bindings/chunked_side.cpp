#include "chunked_side.hpp"

#include <pybind11/stl.h>

#include <optional>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "shared_region.hpp"

namespace py = pybind11;

namespace lmcache_fast {
namespace {

std::unique_ptr<ChunkedSide> from_region(const SharedRegion& region, const py::object& offsets,
                                         std::int64_t tokens_per_chunk, std::int64_t planes,
                                         std::int64_t layers, std::int64_t row_bytes,
                                         std::optional<std::int64_t> plane_stride,
                                         std::optional<std::int64_t> layer_stride,
                                         std::optional<std::int64_t> token_stride,
                                         std::int64_t row_pieces, std::int64_t piece_stride) {
    const auto slots = integers<std::uint64_t>("ChunkedSide.from_region: offsets", offsets);
    ChunkShape shape = ChunkShape::contiguous(tokens_per_chunk, planes, layers, row_bytes);
    shape.plane_stride = plane_stride.value_or(shape.plane_stride);
    shape.layer_stride = layer_stride.value_or(shape.layer_stride);
    shape.token_stride = token_stride.value_or(shape.token_stride);
    shape.row_pieces = row_pieces;
    shape.piece_stride = piece_stride;
    shape.check();
    const auto& mapping = region.mapping();
    std::vector<std::byte*> bases;
    bases.reserve(static_cast<std::size_t>(slots.size()));
    for (py::ssize_t i = 0; i < slots.size(); ++i) {
        mapping->check_slot(slots.data()[i], shape.extent());
        bases.push_back(mapping->address() + slots.data()[i]);
    }
    return std::make_unique<ChunkedSide>(std::move(bases), shape, true, mapping);
}

std::unique_ptr<ChunkedSide> from_addresses(const py::object& addresses, py::object owner,
                                            std::int64_t tokens_per_chunk, std::int64_t planes,
                                            std::int64_t layers, std::int64_t row_bytes,
                                            std::int64_t plane_stride, std::int64_t layer_stride,
                                            std::optional<std::int64_t> token_stride,
                                            std::int64_t row_pieces, std::int64_t piece_stride,
                                            bool writable) {
    const auto values = integers<std::uint64_t>("ChunkedSide.from_addresses: addresses", addresses);
    std::vector<std::byte*> bases;
    bases.reserve(static_cast<std::size_t>(values.size()));
    for (py::ssize_t i = 0; i < values.size(); ++i) {
        bases.push_back(reinterpret_cast<std::byte*>(values.data()[i]));
    }
    const ChunkShape shape{tokens_per_chunk,
                           planes,
                           layers,
                           row_bytes,
                           plane_stride,
                           layer_stride,
                           token_stride.value_or(row_bytes),
                           row_pieces,
                           piece_stride};
    return std::make_unique<ChunkedSide>(std::move(bases), shape, writable,
                                         std::make_shared<py::object>(std::move(owner)));
}

}  // namespace

void register_chunked_side(py::module_& module) {
    py::class_<ChunkedSide>(module, "ChunkedSide")
        .def_static("from_region", &from_region, py::arg("region"), py::arg("offsets"),
                    py::kw_only(), py::arg("tokens_per_chunk"), py::arg("planes"),
                    py::arg("layers"), py::arg("row_bytes"), py::arg("plane_stride") = py::none(),
                    py::arg("layer_stride") = py::none(), py::arg("token_stride") = py::none(),
                    py::arg("row_pieces") = 1, py::arg("piece_stride") = 0)
        .def_static("from_addresses", &from_addresses, py::arg("addresses"), py::arg("owner"),
                    py::kw_only(), py::arg("tokens_per_chunk"), py::arg("planes"),
                    py::arg("layers"), py::arg("row_bytes"), py::arg("plane_stride"),
                    py::arg("layer_stride"), py::arg("token_stride") = py::none(),
                    py::arg("row_pieces") = 1, py::arg("piece_stride") = 0,
                    py::arg("writable") = true)
        .def_property_readonly("num_tokens", &ChunkedSide::num_tokens);
}

}  // namespace lmcache_fast
