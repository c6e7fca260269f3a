// The one way bytes move: runs of token rows from one chunked side to another.
#pragma once

#include <cstddef>

#include "chunked_side.hpp"
#include "copy_plan.hpp"
#include "rotation.hpp"

namespace lmcache_fast {

/// Copies `runs` in every plane and layer, rotating the keys (plane 0) where `rotation` says so, on
/// `num_threads` threads (0: default_num_threads). Source and target must not overlap, nor the runs
/// in the target. Throws std::invalid_argument, before a byte moves, for anything out of bounds.
void copy_runs(const ChunkedSide& source, const ChunkedSide& target, const Run* runs,
               std::size_t num_runs, const Rotation* rotation, unsigned num_threads);

}  // namespace lmcache_fast
