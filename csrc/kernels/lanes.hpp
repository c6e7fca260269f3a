// Vectors of sixteen floats or doubles, made of whatever the instruction set has; a compiler's own
// vectors, when they are wider than that, pass through memory.
// In an unnamed namespace: each kernel file compiles its own copy with its own flags.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__SSE2__)
#include <emmintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#include "scalar_rotation.hpp"

namespace lmcache_fast {
namespace {

#if defined(__AVX512F__)
constexpr int kPartBytes = 64;
#elif defined(__AVX2__)
constexpr int kPartBytes = 32;
#else
constexpr int kPartBytes = 16;
#endif

typedef float FloatPart __attribute__((vector_size(kPartBytes)));
typedef std::int32_t IntPart __attribute__((vector_size(kPartBytes)));
typedef double DoublePart __attribute__((vector_size(kPartBytes)));
typedef std::int64_t LongPart __attribute__((vector_size(kPartBytes)));

constexpr int kLanes = 16;

/// Calls body(constant) for the constants 0 to `count`: arrays that it indexes can be registers,
/// which a compiler does not see through a loop.
template <int count, int first = 0, typename Body>
[[gnu::always_inline]] inline void repeat(const Body& body) {
    if constexpr (first < count) {
        body(std::integral_constant<int, first>{});
        repeat<count, first + 1>(body);
    }
}

template <typename Number_, typename Part_>
struct Lanes {
    using Number = Number_;
    using Part = Part_;
    static constexpr int kPartLanes = static_cast<int>(sizeof(Part) / sizeof(Number));
    static constexpr int kParts = kLanes / kPartLanes;
    Part parts[kParts];

    template <typename Operation>
    [[gnu::always_inline]] static Lanes each(const Operation& operation) {
        Lanes result;
        for (int i = 0; i < kParts; ++i) result.parts[i] = operation(i);
        return result;
    }
    friend Lanes operator+(const Lanes& a, const Lanes& b) {
        return each([&](int i) { return a.parts[i] + b.parts[i]; });
    }
    friend Lanes operator-(const Lanes& a, const Lanes& b) {
        return each([&](int i) { return a.parts[i] - b.parts[i]; });
    }
    friend Lanes operator*(const Lanes& a, const Lanes& b) {
        return each([&](int i) { return a.parts[i] * b.parts[i]; });
    }
    friend Lanes operator/(const Lanes& a, const Lanes& b) {
        return each([&](int i) { return a.parts[i] / b.parts[i]; });
    }
    /// yes where a < b, else no.
    friend Lanes where_less(const Lanes& a, const Lanes& b, const Lanes& yes, const Lanes& no) {
        return each([&](int i) { return a.parts[i] < b.parts[i] ? yes.parts[i] : no.parts[i]; });
    }
};

using Floats = Lanes<float, FloatPart>;
using Doubles = Lanes<double, DoublePart>;
using Ints = Lanes<std::int32_t, IntPart>;

template <typename Vector>
Vector all(typename Vector::Number value) {
    return Vector::each([&](int) { return typename Vector::Part{} + value; });
}

template <typename Vector>
Vector load(const typename Vector::Number* from) {
    return Vector::each([&](int i) {
        typename Vector::Part part;
        std::memcpy(&part, from + i * Vector::kPartLanes, sizeof(part));
        return part;
    });
}

template <typename Vector>
void store(typename Vector::Number* to, const Vector& value) {
    for (int i = 0; i < Vector::kParts; ++i) {
        std::memcpy(to + i * Vector::kPartLanes, &value.parts[i], sizeof(value.parts[i]));
    }
}

/// a where a < b, else b; so b where a is not a number.
Floats lower(const Floats& a, const Floats& b) {
#if defined(__AVX512F__)
    return {{_mm512_min_ps(a.parts[0], b.parts[0])}};
#elif defined(__AVX2__)
    return Floats::each([&](int i) { return _mm256_min_ps(a.parts[i], b.parts[i]); });
#else
    return where_less(a, b, a, b);
#endif
}

/// a where a > b, else b; so b where a is not a number.
Floats higher(const Floats& a, const Floats& b) {
#if defined(__AVX512F__)
    return {{_mm512_max_ps(a.parts[0], b.parts[0])}};
#elif defined(__AVX2__)
    return Floats::each([&](int i) { return _mm256_max_ps(a.parts[i], b.parts[i]); });
#else
    return where_less(b, a, a, b);
#endif
}

#if defined(__SSE2__) && !defined(__AVX2__)
/// a * b + c, rounded once: the product is exact in doubles, and a sum that was rounded to an odd
/// number there is rounded right a second time (Boldo and Melquiond, 2008).
inline __m128 fused_in_doubles(__m128 a, __m128 b, __m128 c) {
    // Intrinsics, since GCC 12 leaves out rounding to float between its own vectors' conversions.
    const auto fused_two = [](__m128 x, __m128 y, __m128 z) {
        const DoublePart product = _mm_cvtps_pd(x) * _mm_cvtps_pd(y);
        const DoublePart other = _mm_cvtps_pd(z);
        const DoublePart sum = product + other;
        const DoublePart of_other = sum - product;
        const DoublePart lost = (product - (sum - of_other)) + (other - of_other);
        const auto bits = reinterpret_cast<LongPart>(sum);
        const LongPart inexact = ((lost < 0) | (lost > 0)) & ((bits & 1) == 0);
        const LongPart outward = (lost > 0) == (sum > 0);
        const LongPart odd = bits + (inexact & ((outward & 1) | ~outward));
        return _mm_cvtpd_ps(reinterpret_cast<__m128d>(odd));
    };
    const auto high = [](__m128 part) { return _mm_movehl_ps(part, part); };
    return _mm_movelh_ps(fused_two(a, b, c), fused_two(high(a), high(b), high(c)));
}
#endif

/// a * b + c, rounded once.
Floats fused(const Floats& a, const Floats& b, const Floats& c) {
#if defined(__AVX512F__)
    return {{_mm512_fmadd_ps(a.parts[0], b.parts[0], c.parts[0])}};
#elif defined(__AVX2__)
    return Floats::each([&](int i) { return _mm256_fmadd_ps(a.parts[i], b.parts[i], c.parts[i]); });
#elif defined(__ARM_NEON)
    return Floats::each([&](int i) {
        return static_cast<FloatPart>(vfmaq_f32(c.parts[i], a.parts[i], b.parts[i]));
    });
#elif defined(__SSE2__)
    return Floats::each(
        [&](int i) { return fused_in_doubles(a.parts[i], b.parts[i], c.parts[i]); });
#else
    return Floats::each([&](int i) {
        FloatPart part{};
        for (int j = 0; j < Floats::kPartLanes; ++j) {
            part[j] = __builtin_fmaf(a.parts[i][j], b.parts[i][j], c.parts[i][j]);
        }
        return part;
    });
#endif
}

Doubles widen(const Floats& value) {
#if defined(__AVX512F__)
    const __m512d all_lanes = _mm512_castps_pd(value.parts[0]);
    return {{_mm512_cvtps_pd(_mm512_castps512_ps256(value.parts[0])),
             _mm512_cvtps_pd(_mm256_castpd_ps(_mm512_extractf64x4_pd(all_lanes, 1)))}};
#elif defined(__AVX2__)
    return Doubles::each([&](int i) {
        const __m256 half = value.parts[i / 2];
        return _mm256_cvtps_pd(i % 2 == 0 ? _mm256_castps256_ps128(half)
                                          : _mm256_extractf128_ps(half, 1));
    });
#elif defined(__SSE2__)
    return Doubles::each([&](int i) {
        const __m128 part = value.parts[i / 2];
        return _mm_cvtps_pd(i % 2 == 0 ? part : _mm_movehl_ps(part, part));
    });
#else
    return Doubles::each([&](int i) {
        const FloatPart& part = value.parts[i / 2];
        const int first = i % 2 * 2;
        return DoublePart{static_cast<double>(part[first]), static_cast<double>(part[first + 1])};
    });
#endif
}

// Not __builtin_sqrt, which asks first whether it has to set errno.
double square_root(double value) {
#if defined(__SSE2__)
    return _mm_cvtsd_f64(_mm_sqrt_pd(_mm_set1_pd(value)));
#else
    return __builtin_sqrt(value);
#endif
}

Floats square_root(const Floats& value) {
    return Floats::each([&](int i) {
#if defined(__AVX512F__)
        return static_cast<FloatPart>(_mm512_sqrt_ps(value.parts[i]));
#elif defined(__AVX2__)
        return static_cast<FloatPart>(_mm256_sqrt_ps(value.parts[i]));
#elif defined(__SSE2__)
        return static_cast<FloatPart>(_mm_sqrt_ps(value.parts[i]));
#elif defined(__ARM_NEON)
        return static_cast<FloatPart>(vsqrtq_f32(value.parts[i]));
#else
        FloatPart part{};
        for (int j = 0; j < Floats::kPartLanes; ++j) part[j] = __builtin_sqrtf(value.parts[i][j]);
        return part;
#endif
    });
}

/// The sum of the lanes: the upper half is added to the lower until there is one.
template <typename Vector>
typename Vector::Number total(const Vector& value) {
    typename Vector::Number lanes[kLanes];
    store(lanes, value);
    for (int half = kLanes / 2; half > 0; half /= 2) {
        for (int i = 0; i < half; ++i) lanes[i] += lanes[half + i];
    }
    return lanes[0];
}

float highest_lane(const Floats& value) {
    float lanes[kLanes];
    store(lanes, value);
    for (int half = kLanes / 2; half > 0; half /= 2) {
        for (int i = 0; i < half; ++i) {
            lanes[i] = lanes[half + i] > lanes[i] ? lanes[half + i] : lanes[i];
        }
    }
    return lanes[0];
}

/// The totals of sixteen vectors as one.
[[gnu::always_inline]] inline Floats totals(const Floats (&sums)[kLanes]) {
#if defined(__AVX512F__)
    // Sixteen become eight each, of two vectors: then four each, of four.
    const auto eights = [](__m512 a, __m512 b) {
        return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
    };
    const auto fours = [&](int i) {
        const __m512 low = eights(sums[i].parts[0], sums[4 + i].parts[0]);
        const __m512 high = eights(sums[8 + i].parts[0], sums[12 + i].parts[0]);
        return _mm512_castps_pd(_mm512_add_ps(_mm512_shuffle_f32x4(low, high, 0x88),
                                              _mm512_shuffle_f32x4(low, high, 0xdd)));
    };
    const auto twos = [](__m512d a, __m512d b) {
        return _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)),
                             _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
    };
    const __m512 low = twos(fours(0), fours(1));
    const __m512 high = twos(fours(2), fours(3));
    return {
        {_mm512_add_ps(_mm512_shuffle_ps(low, high, 0x88), _mm512_shuffle_ps(low, high, 0xdd))}};
#elif defined(__AVX2__)
    // Eight vectors become a part.
    return Floats::each([&](int part) {
        const auto eight = [&](int i) {
            const Floats& sum = sums[8 * part + i];
            return _mm256_add_ps(sum.parts[0], sum.parts[1]);
        };
        const auto fours = [&](int i) {
            const __m256 low = eight(i);
            const __m256 high = eight(4 + i);
            return _mm256_castps_pd(_mm256_add_ps(_mm256_permute2f128_ps(low, high, 0x20),
                                                  _mm256_permute2f128_ps(low, high, 0x31)));
        };
        const auto twos = [](__m256d a, __m256d b) {
            return _mm256_add_ps(_mm256_castpd_ps(_mm256_unpacklo_pd(a, b)),
                                 _mm256_castpd_ps(_mm256_unpackhi_pd(a, b)));
        };
        const __m256 low = twos(fours(0), fours(1));
        const __m256 high = twos(fours(2), fours(3));
        return static_cast<FloatPart>(
            _mm256_add_ps(_mm256_shuffle_ps(low, high, 0x88), _mm256_shuffle_ps(low, high, 0xdd)));
    });
#else
    float result[kLanes];
    for (int i = 0; i < kLanes; ++i) {
        const FloatPart* const parts = sums[i].parts;
        const FloatPart four = (parts[0] + parts[2]) + (parts[1] + parts[3]);
        result[i] = (four[0] + four[2]) + (four[1] + four[3]);
    }
    return load<Floats>(result);
#endif
}

/// In each lane: how often its value was above another.
class Counts {
  public:
    [[gnu::always_inline]] void add_above(const Floats& values, float other) {
#if defined(__AVX512F__)
        add(_mm512_cmp_ps_mask(values.parts[0], _mm512_set1_ps(other), _CMP_GT_OQ));
#else
        for (int i = 0; i < Floats::kParts; ++i) {
            counts_.parts[i] -= values.parts[i] > FloatPart{} + other;
        }
#endif
    }
    [[gnu::always_inline]] void add_not_below(const Floats& values, float other) {
#if defined(__AVX512F__)
        add(_mm512_cmp_ps_mask(values.parts[0], _mm512_set1_ps(other), _CMP_GE_OQ));
#else
        for (int i = 0; i < Floats::kParts; ++i) {
            counts_.parts[i] -= values.parts[i] >= FloatPart{} + other;
        }
#endif
    }
    /// Equal ones count too, in the lanes below `lane`.
    [[gnu::always_inline]] void add_above_in_order(const Floats& values, float other, int lane) {
        add_above(values, other);
#if defined(__AVX512F__)
        const auto below = static_cast<__mmask16>((1U << lane) - 1);
        add(_mm512_mask_cmp_ps_mask(below, values.parts[0], _mm512_set1_ps(other), _CMP_EQ_OQ));
#else
        for (int i = 0; i < Floats::kParts; ++i) {
            IntPart below;
            std::memcpy(&below, kBelow + kLanes - lane + i * Floats::kPartLanes, sizeof(below));
            counts_.parts[i] -= (values.parts[i] == FloatPart{} + other) & below;
        }
#endif
    }
    Floats value() const {
#if defined(__AVX512F__)
        return {{_mm512_cvtepi32_ps(counts_)}};
#else
        return Floats::each(
            [&](int i) { return __builtin_convertvector(counts_.parts[i], FloatPart); });
#endif
    }

  private:
#if defined(__AVX512F__)
    void add(__mmask16 lanes) {
        counts_ = _mm512_mask_sub_epi32(counts_, lanes, counts_, _mm512_set1_epi32(-1));
    }

    __m512i counts_ = _mm512_setzero_si512();
#else
    static constexpr std::int32_t kBelow[2 * kLanes] = {-1, -1, -1, -1, -1, -1, -1, -1,
                                                        -1, -1, -1, -1, -1, -1, -1, -1};
    Ints counts_{};
#endif
};

/// Added to a number of less than 2^22, rounds it to the nearest integer, ties to even.
constexpr float kToInteger = 12582912;  // 1.5 * 2^23

/// value * 2^k, both and the result normal numbers; `shifted` is an integer k to which kToInteger
/// was added.
Floats times_power_of_two(const Floats& value, const Floats& shifted) {
    return Floats::each([&](int i) {
        IntPart bits;
        IntPart exponents;
        std::memcpy(&bits, &value.parts[i], sizeof(bits));
        std::memcpy(&exponents, &shifted.parts[i], sizeof(exponents));
        bits += exponents << 23;  // what is above k's lowest 9 bits falls out
        FloatPart result;
        std::memcpy(&result, &bits, sizeof(result));
        return result;
    });
}

/// Sixteen elements of memory.
template <typename Type>
[[gnu::always_inline]] inline Floats load16(const std::byte* from) {
#if defined(__AVX2__)
    if constexpr (Type::kBytes == 2) {
        return Floats::each([&](int i) {
            const std::byte* const part = from + i * Floats::kPartLanes * 2;
#if defined(__AVX512F__)
            const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(part));
            if constexpr (std::is_same_v<Type, Float16>)
                return _mm512_cvtph_ps(halves);
            else
                return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
#else
            const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(part));
            if constexpr (std::is_same_v<Type, Float16>)
                return _mm256_cvtph_ps(halves);
            else
                return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
#endif
        });
    }
#endif
    float lanes[kLanes];
    for (int i = 0; i < kLanes; ++i) lanes[i] = Type::load(from + i * Type::kBytes);
    return load<Floats>(lanes);
}

/// The first or the second sixteen of thirty-two elements of memory.
template <typename Type, bool second>
[[gnu::always_inline]] inline Floats load_half(const std::byte* from) {
#if defined(__AVX512F__)
    if constexpr (std::is_same_v<Type, BFloat16>) {  // one instruction: a float's upper half
        const __m512i halves = _mm512_loadu_si512(from);
        alignas(64) static constexpr std::uint16_t kFirst[32] = {
            0, 0, 0, 1, 0, 2,  0, 3,  0, 4,  0, 5,  0, 6,  0, 7,
            0, 8, 0, 9, 0, 10, 0, 11, 0, 12, 0, 13, 0, 14, 0, 15};
        __m512i order = _mm512_load_si512(kFirst);
        if constexpr (second) order = _mm512_add_epi16(order, _mm512_set1_epi16(16));
        return {{_mm512_castsi512_ps(_mm512_maskz_permutexvar_epi16(0xaaaaaaaaU, order, halves))}};
    }
#endif
    return load16<Type>(from + (second ? kLanes * Type::kBytes : 0));
}

/// The first `count` elements of memory, at most sixteen, and zeros behind them.
template <typename Type>
[[gnu::always_inline]] inline Floats load_some(const std::byte* from, std::int64_t count) {
    if (count >= kLanes) return load16<Type>(from);
    alignas(64) std::byte rest[kLanes * Type::kBytes] = {};
    std::memcpy(rest, from, static_cast<std::size_t>(count * Type::kBytes));
    return load16<Type>(rest);
}

}  // namespace
}  // namespace lmcache_fast
