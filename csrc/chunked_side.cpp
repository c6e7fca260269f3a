#include "chunked_side.hpp"

#include <stdexcept>
#include <string>
#include <utility>

namespace lmcache_fast {
namespace {

void require_positive(const char* name, std::int64_t value) {
    if (value <= 0) {
        throw std::invalid_argument(std::string("ChunkedSide: ") + name + " is " +
                                    std::to_string(value) + "; expected a positive number");
    }
}

std::int64_t multiply(std::int64_t a, std::int64_t b) {
    std::int64_t product = 0;
    if (__builtin_mul_overflow(a, b, &product)) {
        throw std::invalid_argument("ChunkedSide: a chunk of " + std::to_string(a) + " times " +
                                    std::to_string(b) + " bytes is too large");
    }
    return product;
}

std::int64_t add(std::int64_t a, std::int64_t b) {
    std::int64_t sum = 0;
    if (__builtin_add_overflow(a, b, &sum)) {
        throw std::invalid_argument("ChunkedSide: a chunk is too large");
    }
    return sum;
}

}  // namespace

ChunkShape ChunkShape::contiguous(std::int64_t tokens_per_chunk, std::int64_t planes,
                                  std::int64_t layers, std::int64_t row_bytes) {
    require_positive("tokens_per_chunk", tokens_per_chunk);
    require_positive("planes", planes);
    require_positive("layers", layers);
    require_positive("row_bytes", row_bytes);
    const std::int64_t layer_stride = multiply(tokens_per_chunk, row_bytes);
    const std::int64_t plane_stride = multiply(layers, layer_stride);
    return {tokens_per_chunk, planes, layers, row_bytes, plane_stride, layer_stride, row_bytes};
}

void ChunkShape::check() const {
    require_positive("tokens_per_chunk", tokens_per_chunk);
    require_positive("planes", planes);
    require_positive("layers", layers);
    require_positive("row_bytes", row_bytes);
    require_positive("row_pieces", row_pieces);
    if (row_bytes % row_pieces != 0) {
        throw std::invalid_argument(
            "ChunkedSide: row_bytes is " + std::to_string(row_bytes) +
            "; expected a multiple of row_pieces = " + std::to_string(row_pieces));
    }
    if (row_pieces > 1 && piece_stride < row_bytes / row_pieces) {
        throw std::invalid_argument("ChunkedSide: piece_stride is " + std::to_string(piece_stride) +
                                    "; expected at least a piece, " +
                                    std::to_string(row_bytes / row_pieces));
    }
    const std::pair<const char*, std::int64_t> strides[] = {{"plane_stride", plane_stride},
                                                            {"layer_stride", layer_stride},
                                                            {"token_stride", token_stride}};
    for (const auto& [name, stride] : strides) {
        if (stride < 0) {
            throw std::invalid_argument(std::string("ChunkedSide: ") + name + " is " +
                                        std::to_string(stride) + "; expected no negative stride");
        }
    }
    if (tokens_per_chunk > 1 && token_stride < row_extent()) {
        throw std::invalid_argument("ChunkedSide: token_stride is " + std::to_string(token_stride) +
                                    "; expected at least a row, " + std::to_string(row_extent()));
    }
    (void)extent();
}

bool ChunkShape::is_contiguous() const {
    return row_extent() == row_bytes && token_stride == row_bytes &&
           layer_stride == tokens_per_chunk * row_bytes && plane_stride == layers * layer_stride;
}

std::int64_t ChunkShape::row_extent() const {
    return add(multiply(row_pieces - 1, piece_stride), row_bytes / row_pieces);
}

std::uint64_t ChunkShape::extent() const {
    const std::int64_t rows = add(multiply(tokens_per_chunk - 1, token_stride), row_extent());
    const std::int64_t layer_bytes = add(multiply(layers - 1, layer_stride), rows);
    return static_cast<std::uint64_t>(add(multiply(planes - 1, plane_stride), layer_bytes));
}

ChunkedSide::ChunkedSide(std::vector<std::byte*> bases, const ChunkShape& shape, bool writable,
                         std::shared_ptr<const void> owner)
    : bases_(std::move(bases)), shape_(shape), writable_(writable), owner_(std::move(owner)) {
    shape_.check();
    multiply(static_cast<std::int64_t>(bases_.size()), shape_.tokens_per_chunk);
    for (const std::byte* base : bases_) {
        if (base == nullptr) {
            throw std::invalid_argument("ChunkedSide: an address is 0; expected a chunk's base");
        }
    }
}

}  // namespace lmcache_fast
