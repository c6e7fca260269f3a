// What an instruction set provides. Kernel files include nothing that another file could share
// inline code with: code compiled for a newer processor must never be picked by the linker for all.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../head_shape.hpp"

namespace lmcache_fast {

/// Pieces that are written at the same time.
constexpr std::size_t kStreams = 8;

/// One row of keys and its angles.
struct RotatedRow {
    const std::byte* source;
    std::byte* target;
    const float* cosines;
    const float* sines;
};

/// From each row of keys to the values of the same token, in bytes.
struct ValueRows {
    std::ptrdiff_t source;
    std::ptrdiff_t target;
};

struct Kernels {
    const char* name;
    bool (*supported)();
    /// Whether several pieces are best moved in turn.
    bool (*takes_turns)();

    /// Copies kStreams pieces of `bytes` (a multiple of 64; targets aligned to 64) past the cache
    /// and prefetches `next`, the pieces that come after them.
    void (*stream_copy)(const std::byte* const* sources, std::byte* const* targets,
                        const std::byte* const* next, std::size_t bytes);
    /// Rotates `count` (at most kStreams) rows and prefetches `next`. `stream`: past the cache;
    /// targets are aligned to 64 and rows a multiple of 64 bytes then. With `values` these are
    /// copied along: while they wait for the memory, keys are computed.
    void (*rotate)(const HeadShape& heads, const RotatedRow* rows, const std::byte* const* next,
                   std::size_t count, bool stream, const ValueRows* values);
    /// Makes what this thread streamed visible before anything it writes later.
    void (*fence)();
};

extern const Kernels kPortableKernels;
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;
extern const Kernels kNeonKernels;

/// Kernel sets that this processor runs, best first.
const Kernels* const* supported_kernels(std::size_t& count);
/// The set in use: the best one unless set_kernels chose another.
const Kernels& active_kernels();
/// Uses the set of this name from now on; false if this processor has none of that name.
bool set_kernels(const char* name);

}  // namespace lmcache_fast
