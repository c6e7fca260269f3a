// Runs of token rows, cut into pieces that a kernel moves. Nothing is touched before it is checked.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "chunked_side.hpp"
#include "rotation.hpp"

namespace lmcache_fast {

/// `count` rows in a row on both sides.
struct Run {
    std::int64_t source;
    std::int64_t target;
    std::int64_t count;
};

/// Bytes in a row on both sides, in plane 0 of layer 0. The other planes and layers have the same
/// piece at their own offset.
struct Piece {
    const std::byte* source;
    std::byte* target;
    std::uint32_t bytes;
    std::int32_t table_row;  // -1: copied as it is in plane 0 too
};

struct CopyPlan {
    std::vector<Piece> pieces;
    std::int64_t bytes = 0;  // of one plane of one layer
};

/// Checks everything and cuts `runs` into pieces. Throws std::invalid_argument naming what is
/// wrong.
CopyPlan plan_copy(const ChunkedSide& source, const ChunkedSide& target, const Run* runs,
                   std::size_t num_runs, const Rotation* rotation);

}  // namespace lmcache_fast
