#include "run_copy.hpp"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <system_error>

#include "bus_guard.hpp"
#include "kernels/kernels.hpp"
#include "thread_pool.hpp"

namespace lmcache_fast {
namespace {

#ifndef LMCACHE_FAST_STREAM_FROM  // tests stream less, which takes less time
#define LMCACHE_FAST_STREAM_FROM (4 << 20)
#endif
// Below this a target is likely to be read again from the cache.
constexpr std::int64_t kStreamFrom = LMCACHE_FAST_STREAM_FROM;
// Below this another thread costs more than it brings.
constexpr std::int64_t kParallelFrom = std::int64_t{256} << 10;
constexpr std::int64_t kTileBytes = std::int64_t{512} << 10;
// So few rows that their angles are still in the cache when the next layer needs them.
constexpr std::int64_t kRotatedTileBytes = std::int64_t{64} << 10;
constexpr std::size_t kLine = 64;

bool aligned(const void* address, std::size_t bytes) {
    return reinterpret_cast<std::uintptr_t>(address) % kLine == 0 && bytes % kLine == 0;
}

/// Moves some pieces in one plane of one layer.
class Mover {
  public:
    Mover(const Kernels& kernels, const Rotation* rotation, bool stream)
        : kernels_(kernels), rotation_(rotation), stream_(stream) {}

    void move(const Piece* begin, const Piece* end, std::int64_t from, std::int64_t to,
              bool keys) const {
        for (const Piece* at = begin; at < end;) {
            const bool rotated = keys && at->table_row >= 0;
            const Piece* stop = batch_end(at, end, keys, kStreams);
            if (rotated) {
                rotate(at, stop, end, from, to, nullptr);
            } else {
                copy(at, stop, end, from, to);
            }
            at = stop;
        }
    }

    /// Keys and values of a layer.
    void move_both(const Piece* begin, const Piece* end, std::int64_t from, std::int64_t to,
                   const ValueRows& values) const {
        for (const Piece* at = begin; at < end;) {
            const bool rotated = at->table_row >= 0;
            const Piece* stop = batch_end(at, end, true, rotated ? kStreams / 2 : kStreams);
            if (rotated) {
                rotate(at, stop, end, from, to, &values);
            } else {
                copy(at, stop, end, from, to);
                copy(at, stop, end, from + values.source, to + values.target);
            }
            at = stop;
        }
    }

  private:
    /// Up to `streams` pieces of one kind and length.
    static const Piece* batch_end(const Piece* at, const Piece* end, bool keys,
                                  std::ptrdiff_t streams) {
        const Piece* most = at + std::min(end - at, streams);
        const Piece* stop = at + 1;
        while (stop < most && stop->bytes == at->bytes &&
               (!keys || (stop->table_row < 0) == (at->table_row < 0))) {
            ++stop;
        }
        return stop;
    }

    void copy(const Piece* at, const Piece* stop, const Piece* end, std::int64_t from,
              std::int64_t to) const {
        const std::byte* sources[kStreams];
        const std::byte* next[kStreams];
        std::byte* targets[kStreams];
        const auto count = static_cast<std::size_t>(stop - at);
        bool stream = stream_ && count == kStreams;
        for (std::size_t i = 0; i < count; ++i) {
            sources[i] = at[i].source + from;
            targets[i] = at[i].target + to;
            stream = stream && aligned(targets[i], at->bytes);
        }
        if (!stream) {
            for (std::size_t i = 0; i < count; ++i) std::memcpy(targets[i], sources[i], at->bytes);
            return;
        }
        for (std::size_t i = 0; i < count; ++i) {
            next[i] = stop + i < end ? stop[i].source + from : sources[i];
        }
        kernels_.stream_copy(sources, targets, next, at->bytes);
    }

    void rotate(const Piece* at, const Piece* stop, const Piece* end, std::int64_t from,
                std::int64_t to, const ValueRows* values) const {
        RotatedRow rows[kStreams];
        HeadShape heads = rotation_->heads();
        heads.num_heads = at->bytes / heads.head_bytes();  // a piece may be less than a row
        const std::byte* next[kStreams];
        const auto count = static_cast<std::size_t>(stop - at);
        bool stream = stream_;
        for (std::size_t i = 0; i < count; ++i) {
            rows[i] = {at[i].source + from, at[i].target + to, rotation_->cosines(at[i].table_row),
                       rotation_->sines(at[i].table_row)};
            next[i] = stop + i < end ? stop[i].source + from : rows[i].source;
            stream = stream && aligned(rows[i].target, at[i].bytes) &&
                     (values == nullptr || aligned(rows[i].target + values->target, kLine));
        }
        kernels_.rotate(heads, rows, next, count, stream, values);
    }

    const Kernels& kernels_;
    const Rotation* rotation_;
    bool stream_;
};

/// Where each tile's pieces begin, and the end. Whole batches, so that few are cut short.
std::vector<std::size_t> cut_tiles(const CopyPlan& plan, std::int64_t tile_bytes) {
    std::vector<std::size_t> begins{0};
    std::int64_t bytes = 0;
    for (std::size_t i = 0; i < plan.pieces.size(); ++i) {
        if (bytes >= tile_bytes && (i - begins.back()) % kStreams == 0) {
            begins.push_back(i);
            bytes = 0;
        }
        bytes += plan.pieces[i].bytes;
    }
    begins.push_back(plan.pieces.size());
    return begins;
}

}  // namespace

void copy_runs(const ChunkedSide& source, const ChunkedSide& target, const Run* runs,
               std::size_t num_runs, const Rotation* rotation, unsigned num_threads) {
    const CopyPlan plan = plan_copy(source, target, runs, num_runs, rotation);
    if (plan.pieces.empty()) return;
    const ChunkShape& from = source.shape();
    const ChunkShape& to = target.shape();
    const std::int64_t total = plan.bytes * from.planes * from.layers;
    const std::vector<std::size_t> begins =
        cut_tiles(plan, rotation != nullptr ? kRotatedTileBytes : kTileBytes);
    const Kernels& kernels = active_kernels();
    const Mover mover(kernels, rotation, total >= kStreamFrom);

    // Layers vary fastest: the next tile of a thread needs the same rows of the rotation's tables.
    const auto layers = static_cast<std::size_t>(from.layers);
    const auto planes = static_cast<std::size_t>(from.planes);
    const bool both = rotation != nullptr && planes == 2 && kernels.takes_turns();
    const std::size_t parts = both ? 1 : planes;
    const std::size_t tiles = (begins.size() - 1) * parts * layers;
    const ValueRows values{from.plane_stride, to.plane_stride};
    const unsigned threads =
        total < kParallelFrom ? 1 : (num_threads != 0 ? num_threads : default_num_threads());
    std::atomic<bool> intact{true};
    catch_bus_errors();
    ThreadPool::instance().run(threads, tiles, [&](TaskQueue& queue) {
        const bool survived = survives_bus_error([&] {
            for (std::size_t tile = 0; queue.take(tile);) {
                const auto layer = static_cast<std::int64_t>(tile % layers);
                const auto plane = static_cast<std::int64_t>(tile / layers % parts);
                const std::size_t group = tile / layers / parts;
                const Piece* const begin = plan.pieces.data() + begins[group];
                const Piece* const end = plan.pieces.data() + begins[group + 1];
                const std::int64_t source_at =
                    plane * from.plane_stride + layer * from.layer_stride;
                const std::int64_t target_at = plane * to.plane_stride + layer * to.layer_stride;
                if (both) {
                    mover.move_both(begin, end, source_at, target_at, values);
                } else {
                    mover.move(begin, end, source_at, target_at, plane == 0);
                }
            }
        });
        if (!survived) intact = false;
        kernels.fence();
    });
    if (!intact) {
        throw std::system_error(EFAULT, std::generic_category(),
                                "copy_runs: memory went away under the copy: a mapped file was "
                                "made shorter, or its file system is full");
    }
}

}  // namespace lmcache_fast
