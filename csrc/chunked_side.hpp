// One side of a copy: where each token's row is, for every plane and layer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace lmcache_fast {

/// What every chunk of a side looks like. Strides are bytes. A row may stand in several pieces of
/// the same length: keys and values of a head behind one another, then those of the next head.
struct ChunkShape {
    std::int64_t tokens_per_chunk;
    std::int64_t planes;
    std::int64_t layers;
    std::int64_t row_bytes;
    std::int64_t plane_stride;
    std::int64_t layer_stride;
    std::int64_t token_stride;
    std::int64_t row_pieces = 1;
    std::int64_t piece_stride = 0;

    /// The shape of a contiguous [planes, layers, tokens, row].
    static ChunkShape contiguous(std::int64_t tokens_per_chunk, std::int64_t planes,
                                 std::int64_t layers, std::int64_t row_bytes);
    /// Throws std::invalid_argument where a number makes no sense or a chunk's size overflows.
    void check() const;
    bool is_contiguous() const;
    /// Bytes from a row's beginning to its piece `piece`, when rows are moved in `pieces`, which is
    /// a multiple of row_pieces.
    std::int64_t piece_offset(std::int64_t piece, std::int64_t pieces) const {
        const std::int64_t finer = pieces / row_pieces;
        return piece / finer * piece_stride + piece % finer * (row_bytes / pieces);
    }
    /// Bytes from a row's beginning to its end.
    std::int64_t row_extent() const;
    /// Bytes from a chunk's base to the end of its last row.
    std::uint64_t extent() const;
};

/// A list of chunks that stand one behind the other: token t is row t % tokens_per_chunk of chunk
/// t / tokens_per_chunk. Does not move.
class ChunkedSide {
  public:
    /// `owner` keeps the memory alive. Throws std::invalid_argument for a bad shape or a null base.
    ChunkedSide(std::vector<std::byte*> bases, const ChunkShape& shape, bool writable,
                std::shared_ptr<const void> owner);

    const ChunkShape& shape() const { return shape_; }
    const std::vector<std::byte*>& bases() const { return bases_; }
    bool writable() const { return writable_; }
    std::int64_t num_tokens() const {
        return static_cast<std::int64_t>(bases_.size()) * shape_.tokens_per_chunk;
    }

  private:
    std::vector<std::byte*> bases_;
    ChunkShape shape_;
    bool writable_;
    std::shared_ptr<const void> owner_;
};

}  // namespace lmcache_fast
