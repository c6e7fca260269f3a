// The streaming copy, written once for every instruction set.
//
// Intel's memory controllers do best with two lines of each of eight pages in turn, fetched a few
// hundred bytes before; AMD's (measured on Zen 3) with one page after the other: eight streams of a
// page each fall into the same set of its first-level cache.
// In an unnamed namespace: each kernel file compiles its own copy with its own flags.
#pragma once

#include <cstddef>

#include "kernels.hpp"

namespace lmcache_fast {
namespace {

/// Whether several pieces should be written in turn.
bool takes_turns() {
#if defined(__x86_64__)
    static const bool turns = __builtin_cpu_is("amd") == 0;
    return turns;
#else
    return true;
#endif
}

constexpr std::size_t kTurnBytes = 128;   // of one piece: what the prefetchers fetch as a pair
constexpr std::size_t kAheadBytes = 512;  // in the same piece, and in the one after it

/// Isa::stream_line copies 64 bytes past the cache, Isa::prefetch fetches as many.
template <typename Isa>
void stream_copy(const std::byte* const* sources, std::byte* const* targets,
                 const std::byte* const* next, std::size_t bytes) {
    if (takes_turns()) {
        const std::size_t distance = bytes < kAheadBytes ? bytes : kAheadBytes;
        for (std::size_t at = 0; at < bytes; at += kTurnBytes) {
            const bool same = at + distance < bytes;
            const std::size_t fetched = same ? at + distance : at + distance - bytes;
            const std::byte* const* from = same ? sources : next;
            const bool both = bytes - at > 64;
            for (std::size_t i = 0; i < kStreams; ++i) {
                Isa::prefetch(from[i] + fetched);
                Isa::stream_line(sources[i] + at, targets[i] + at);
                if (!both) continue;
                Isa::prefetch(from[i] + fetched + 64);
                Isa::stream_line(sources[i] + at + 64, targets[i] + at + 64);
            }
        }
        return;
    }
    for (std::size_t i = 0; i < kStreams; ++i) {
        const std::byte* following = i + 1 < kStreams ? sources[i + 1] : next[0];
        for (std::size_t at = 0; at < bytes; at += 64) {
            Isa::prefetch(following + at);
            Isa::stream_line(sources[i] + at, targets[i] + at);
        }
    }
}

}  // namespace
}  // namespace lmcache_fast
