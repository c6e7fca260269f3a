// AVX2 and F16C: x86-64 processors since about 2013.
#include <immintrin.h>

#include "stream_copy.hpp"
#include "vector_rotation.hpp"

namespace lmcache_fast {
namespace {

void store_bits(std::byte* to, __m256i bits, bool stream) {
    if (stream) {
        _mm256_stream_si256(reinterpret_cast<__m256i*>(to), bits);
    } else {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), bits);
    }
}

__m256i load_bits(const std::byte* from) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
}

struct Avx2 {
    using Floats = __m256;
    static constexpr std::int64_t kLanes = 8;

    static Floats load(const float* from) { return _mm256_loadu_ps(from); }
    static void store(float* to, Floats value) { _mm256_storeu_ps(to, value); }
    static Floats multiply(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
    static Floats add(Floats a, Floats b) { return _mm256_add_ps(a, b); }
    static Floats subtract(Floats a, Floats b) { return _mm256_sub_ps(a, b); }
    static bool any_nan(Floats a, Floats b, Floats c, Floats d) {
        return _mm256_movemask_ps(_mm256_or_ps(_mm256_cmp_ps(a, b, _CMP_UNORD_Q),
                                               _mm256_cmp_ps(c, d, _CMP_UNORD_Q))) != 0;
    }
    static void prefetch(const std::byte* at) {
        _mm_prefetch(reinterpret_cast<const char*>(at), _MM_HINT_T0);
    }
    static void stream_line(const std::byte* from, std::byte* to) {
        const __m256i low = load_bits(from);
        const __m256i high = load_bits(from + 32);
        store_bits(to, low, true);
        store_bits(to + 32, high, true);
    }

    template <typename Type>
    struct Format;
};

// A bfloat16 is the upper half of a float: even elements are shifted up, odd ones masked.
template <>
struct Avx2::Format<BFloat16> {
    static constexpr bool kNanSafe = false;
    static constexpr bool kSplitsPairs = true;
    static void load(const std::byte* from, __m256& a, __m256& b) {
        const __m256i bits = load_bits(from);
        a = _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16));
        b = _mm256_castsi256_ps(_mm256_and_si256(bits, _mm256_set1_epi32(-65536)));
    }
    static void store(std::byte* to, __m256 a, __m256 b, bool stream) {
        const __m256i even = _mm256_srli_epi32(round(a), 16);
        store_bits(to, _mm256_blend_epi16(even, round(b), 0xaa), stream);
    }
    static void angles(const float* from, __m256& a, __m256& b) {
        const __m256 low = _mm256_loadu_ps(from);
        const __m256 high = _mm256_loadu_ps(from + 8);
        a = in_order(_mm256_shuffle_ps(low, high, 0x88));
        b = in_order(_mm256_shuffle_ps(low, high, 0xdd));
    }

  private:
    static __m256i round(__m256 value) {
        const __m256i bits = _mm256_castps_si256(value);
        const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
        return _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    }
    static __m256 in_order(__m256 shuffled) {
        return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(shuffled), 0xd8));
    }
};

template <>
struct Avx2::Format<Float16> {
    static constexpr bool kNanSafe = true;
    static constexpr bool kSplitsPairs = false;
    static void load(const std::byte* from, __m256& a, __m256& b) {
        const __m256i bits = load_bits(from);
        a = _mm256_cvtph_ps(_mm256_castsi256_si128(bits));
        b = _mm256_cvtph_ps(_mm256_extracti128_si256(bits, 1));
    }
    static void store(std::byte* to, __m256 a, __m256 b, bool stream) {
        const __m128i low = _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        const __m128i high = _mm256_cvtps_ph(b, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        store_bits(to, _mm256_set_m128i(high, low), stream);
    }
    static void angles(const float* from, __m256& a, __m256& b) {
        a = _mm256_loadu_ps(from);
        b = _mm256_loadu_ps(from + 8);
    }
};

template <>
struct Avx2::Format<Float32> {
    static constexpr bool kNanSafe = true;
    static constexpr bool kSplitsPairs = false;
    static void load(const std::byte* from, __m256& a, __m256& b) {
        a = _mm256_castsi256_ps(load_bits(from));
        b = _mm256_castsi256_ps(load_bits(from + 32));
    }
    static void store(std::byte* to, __m256 a, __m256 b, bool stream) {
        store_bits(to, _mm256_castps_si256(a), stream);
        store_bits(to + 32, _mm256_castps_si256(b), stream);
    }
    static void angles(const float* from, __m256& a, __m256& b) {
        a = _mm256_loadu_ps(from);
        b = _mm256_loadu_ps(from + 8);
    }
};

bool supported() {
    return __builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("f16c") != 0 &&
           __builtin_cpu_supports("fma") != 0;
}

void fence() {
    _mm_sfence();
}

}  // namespace

const Kernels kAvx2Kernels{"avx2", supported, takes_turns, stream_copy<Avx2>, vector_rotate<Avx2>,
                           fence};

}  // namespace lmcache_fast
