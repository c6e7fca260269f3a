// The streaming copy, written once for every instruction set.
//
// Intel's memory controllers do best with a line of each of eight pages in turn; AMD's (measured on
// Zen 3) with one page after the other: eight streams of a page each fall into the same set of its
// first-level cache.
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

/// Isa::stream_line copies 64 bytes past the cache, Isa::prefetch fetches as many.
template <typename Isa>
void stream_copy(const std::byte* const* sources, std::byte* const* targets,
                 const std::byte* const* next, std::size_t bytes) {
    if (takes_turns()) {
        for (std::size_t at = 0; at < bytes; at += 64) {
            for (std::size_t i = 0; i < kStreams; ++i) {
                Isa::prefetch(next[i] + at);
                Isa::stream_line(sources[i] + at, targets[i] + at);
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
