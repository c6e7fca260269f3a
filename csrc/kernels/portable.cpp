// Plain C++ for every processor, and what the vector kernels are compared with.
#include <cstring>

#include "scalar_rotation.hpp"

namespace lmcache_fast {
namespace {

bool supported() {
    return true;
}

bool takes_turns() {
    return false;
}

void copy(const std::byte* const* sources, std::byte* const* targets, const std::byte* const*,
          std::size_t bytes) {
    for (std::size_t i = 0; i < kStreams; ++i) std::memcpy(targets[i], sources[i], bytes);
}

void rotate(const HeadShape& heads, const RotatedRow* rows, const std::byte* const*,
            std::size_t count, bool, const ValueRows* values) {
    scalar_rotate(heads, rows, count);
    if (values != nullptr) copy_values(heads, rows, count, *values);
}

void fence() {}  // ordinary stores: the thread pool hands them over

}  // namespace

const Kernels kPortableKernels{"portable", supported, takes_turns, copy, rotate, fence};

}  // namespace lmcache_fast
