// AVX-512 F, BW and VL: servers since Skylake, Zen 4.
#include <immintrin.h>

#include "stream_copy.hpp"
#include "vector_rotation.hpp"

namespace lmcache_fast {
namespace {

void store_bits(std::byte* to, __m512i bits, bool stream) {
    if (stream) {
        _mm512_stream_si512(reinterpret_cast<__m512i*>(to), bits);
    } else {
        _mm512_storeu_si512(to, bits);
    }
}

struct Avx512 {
    using Floats = __m512;
    static constexpr std::int64_t kLanes = 16;

    static Floats load(const float* from) { return _mm512_loadu_ps(from); }
    static void store(float* to, Floats value) { _mm512_storeu_ps(to, value); }
    static Floats multiply(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
    static Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
    static Floats subtract(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
    static bool any_nan(Floats a, Floats b, Floats c, Floats d) {
        const __mmask16 numbers = _mm512_cmp_ps_mask(a, b, _CMP_ORD_Q);
        return _mm512_mask_cmp_ps_mask(numbers, c, d, _CMP_ORD_Q) != 0xffff;
    }
    static void prefetch(const std::byte* at) {
        _mm_prefetch(reinterpret_cast<const char*>(at), _MM_HINT_T0);
    }
    static void stream_line(const std::byte* from, std::byte* to) {
        store_bits(to, _mm512_loadu_si512(from), true);
    }

    template <typename Type>
    struct Format;
};

// A bfloat16 is the upper half of a float: even elements are shifted up, odd ones masked.
template <>
struct Avx512::Format<BFloat16> {
    static constexpr bool kNanSafe = false;
    static constexpr bool kSplitsPairs = true;
    static void load(const std::byte* from, __m512& a, __m512& b) {
        const __m512i bits = _mm512_loadu_si512(from);
        a = _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
        b = _mm512_castsi512_ps(_mm512_and_si512(bits, _mm512_set1_epi32(-65536)));
    }
    // Both results are cut into their upper and lower halves. An upper half grows by one where the
    // lower one is more than half a unit, or exactly that and the upper one odd.
    static void store(std::byte* to, __m512 a, __m512 b, bool stream) {
        const __m512i even = _mm512_castps_si512(a);
        const __m512i odd = _mm512_castps_si512(b);
        const __m512i swap = _mm512_broadcast_i32x4(
            _mm_set_epi8(13, 12, 15, 14, 9, 8, 11, 10, 5, 4, 7, 6, 1, 0, 3, 2));
        constexpr __mmask64 kLow = 0x3333333333333333U;
        const __m512i upper = _mm512_mask_shuffle_epi8(odd, kLow, even, swap);
        const __m512i lower = _mm512_mask_shuffle_epi8(even, ~kLow, odd, swap);
        constexpr int kOrAnd = 0xf8;  // lower | (upper & 1)
        const __m512i rest = _mm512_ternarylogic_epi32(lower, upper, _mm512_set1_epi16(1), kOrAnd);
        const __mmask32 up = _mm512_cmpgt_epu16_mask(rest, _mm512_set1_epi16(-0x8000));
        store_bits(to, _mm512_mask_sub_epi16(upper, up, upper, _mm512_set1_epi16(-1)), stream);
    }
    static void angles(const float* from, __m512& a, __m512& b) {
        const __m512i even =
            _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
        const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
        const __m512 low = _mm512_loadu_ps(from);
        const __m512 high = _mm512_loadu_ps(from + 16);
        a = _mm512_permutex2var_ps(low, even, high);
        b = _mm512_permutex2var_ps(low, odd, high);
    }
};

template <>
struct Avx512::Format<Float16> {
    static constexpr bool kNanSafe = true;
    static constexpr bool kSplitsPairs = false;
    static void load(const std::byte* from, __m512& a, __m512& b) {
        const __m512i bits = _mm512_loadu_si512(from);
        a = _mm512_cvtph_ps(_mm512_castsi512_si256(bits));
        b = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(bits, 1));
    }
    static void store(std::byte* to, __m512 a, __m512 b, bool stream) {
        const __m256i low = _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        const __m256i high = _mm512_cvtps_ph(b, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        store_bits(to, _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1), stream);
    }
    static void angles(const float* from, __m512& a, __m512& b) {
        a = _mm512_loadu_ps(from);
        b = _mm512_loadu_ps(from + 16);
    }
};

template <>
struct Avx512::Format<Float32> {
    static constexpr bool kNanSafe = true;
    static constexpr bool kSplitsPairs = false;
    static void load(const std::byte* from, __m512& a, __m512& b) {
        a = _mm512_castsi512_ps(_mm512_loadu_si512(from));
        b = _mm512_castsi512_ps(_mm512_loadu_si512(from + 64));
    }
    static void store(std::byte* to, __m512 a, __m512 b, bool stream) {
        store_bits(to, _mm512_castps_si512(a), stream);
        store_bits(to + 64, _mm512_castps_si512(b), stream);
    }
    static void angles(const float* from, __m512& a, __m512& b) {
        a = _mm512_loadu_ps(from);
        b = _mm512_loadu_ps(from + 16);
    }
};

bool supported() {
    return __builtin_cpu_supports("avx512f") != 0 && __builtin_cpu_supports("avx512bw") != 0 &&
           __builtin_cpu_supports("avx512vl") != 0 && __builtin_cpu_supports("f16c") != 0;
}

void fence() {
    _mm_sfence();
}

}  // namespace

const Kernels kAvx512Kernels{
    "avx512", supported, takes_turns, stream_copy<Avx512>, vector_rotate<Avx512>, fence};

}  // namespace lmcache_fast
