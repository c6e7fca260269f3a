// AVX2 and F16C: x86-64 processors since about 2013.
#include <immintrin.h>

#include "scalar_rotation.hpp"

namespace lmcache_fast {
namespace {

bool supported() {
    return __builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("f16c") != 0;
}

void copy(const std::byte* const* sources, std::byte* const* targets, const std::byte* const* next,
          std::size_t bytes) {
    for (std::size_t at = 0; at < bytes; at += 64) {
        for (std::size_t i = 0; i < kStreams; ++i) {
            _mm_prefetch(reinterpret_cast<const char*>(next[i] + at), _MM_HINT_T0);
            const auto* from = reinterpret_cast<const __m256i*>(sources[i] + at);
            auto* to = reinterpret_cast<__m256i*>(targets[i] + at);
            const __m256i low = _mm256_loadu_si256(from);
            const __m256i high = _mm256_loadu_si256(from + 1);
            _mm256_stream_si256(to, low);
            _mm256_stream_si256(to + 1, high);
        }
    }
}

void rotate(const HeadShape& heads, const RotatedRow* rows, std::size_t count, bool) {
    scalar_rotate(heads, rows, count);
}

void fence() {
    _mm_sfence();
}

}  // namespace

const Kernels kAvx2Kernels{"avx2", supported, copy, rotate, fence};

}  // namespace lmcache_fast
