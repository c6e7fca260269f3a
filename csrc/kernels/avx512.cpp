// AVX-512 F, BW and VL: servers since Skylake, Zen 4.
#include <immintrin.h>

#include "scalar_rotation.hpp"

namespace lmcache_fast {
namespace {

bool supported() {
    return __builtin_cpu_supports("avx512f") != 0 && __builtin_cpu_supports("avx512bw") != 0 &&
           __builtin_cpu_supports("avx512vl") != 0;
}

void copy(const std::byte* const* sources, std::byte* const* targets, const std::byte* const* next,
          std::size_t bytes) {
    for (std::size_t at = 0; at < bytes; at += 64) {
        for (std::size_t i = 0; i < kStreams; ++i) {
            _mm_prefetch(reinterpret_cast<const char*>(next[i] + at), _MM_HINT_T0);
            const __m512i line = _mm512_loadu_si512(sources[i] + at);
            _mm512_stream_si512(reinterpret_cast<__m512i*>(targets[i] + at), line);
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

const Kernels kAvx512Kernels{"avx512", supported, copy, rotate, fence};

}  // namespace lmcache_fast
