// Vectors of eight floats or doubles, made of whatever the instruction set has; a compiler's own
// vectors, when they are wider than that, pass through memory.
// In an unnamed namespace: each kernel file compiles its own copy with its own flags.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "scalar_rotation.hpp"

namespace lmcache_fast {
namespace {

#if defined(__AVX512F__)
constexpr int kFloatBytes = 32;
constexpr int kDoubleBytes = 64;
#elif defined(__AVX2__)
constexpr int kFloatBytes = 32;
constexpr int kDoubleBytes = 32;
#else
constexpr int kFloatBytes = 16;
constexpr int kDoubleBytes = 16;
#endif

typedef float FloatPart __attribute__((vector_size(kFloatBytes)));
typedef double DoublePart __attribute__((vector_size(kDoubleBytes)));
typedef std::int64_t LongPart __attribute__((vector_size(kDoubleBytes)));

template <typename Number_, typename Part_>
struct Eight {
    using Number = Number_;
    using Part = Part_;
    static constexpr int kPartLanes = static_cast<int>(sizeof(Part) / sizeof(Number));
    static constexpr int kParts = 8 / kPartLanes;
    Part parts[kParts];

    template <typename Operation>
    static Eight each(const Operation& operation) {
        Eight result;
        for (int i = 0; i < kParts; ++i) result.parts[i] = operation(i);
        return result;
    }
    friend Eight operator+(const Eight& a, const Eight& b) {
        return each([&](int i) { return a.parts[i] + b.parts[i]; });
    }
    friend Eight operator-(const Eight& a, const Eight& b) {
        return each([&](int i) { return a.parts[i] - b.parts[i]; });
    }
    friend Eight operator*(const Eight& a, const Eight& b) {
        return each([&](int i) { return a.parts[i] * b.parts[i]; });
    }
    friend Eight operator/(const Eight& a, const Eight& b) {
        return each([&](int i) { return a.parts[i] / b.parts[i]; });
    }
    friend Eight operator+(const Eight& a, Number b) {
        return each([&](int i) { return a.parts[i] + b; });
    }
    friend Eight operator-(const Eight& a, Number b) {
        return each([&](int i) { return a.parts[i] - b; });
    }
    friend Eight operator*(const Eight& a, Number b) {
        return each([&](int i) { return a.parts[i] * b; });
    }
    /// yes where a < b, else no.
    friend Eight where_less(const Eight& a, const Eight& b, const Eight& yes, const Eight& no) {
        return each([&](int i) { return a.parts[i] < b.parts[i] ? yes.parts[i] : no.parts[i]; });
    }
};

using Floats = Eight<float, FloatPart>;
using Doubles = Eight<double, DoublePart>;

/// a where a < b, else b; so b where a is not a number.
Floats lower(const Floats& a, const Floats& b) {
#if defined(__AVX2__)
    return {{_mm256_min_ps(a.parts[0], b.parts[0])}};
#else
    return where_less(a, b, a, b);
#endif
}

/// a where a > b, else b; so b where a is not a number.
Floats higher(const Floats& a, const Floats& b) {
#if defined(__AVX2__)
    return {{_mm256_max_ps(a.parts[0], b.parts[0])}};
#else
    return where_less(b, a, a, b);
#endif
}

/// As for floats.
Doubles lower(const Doubles& a, const Doubles& b) {
#if defined(__AVX512F__)
    return {{_mm512_min_pd(a.parts[0], b.parts[0])}};
#elif defined(__AVX2__)
    return {{_mm256_min_pd(a.parts[0], b.parts[0]), _mm256_min_pd(a.parts[1], b.parts[1])}};
#else
    return where_less(a, b, a, b);
#endif
}

Doubles higher(const Doubles& a, const Doubles& b) {
#if defined(__AVX512F__)
    return {{_mm512_max_pd(a.parts[0], b.parts[0])}};
#elif defined(__AVX2__)
    return {{_mm256_max_pd(a.parts[0], b.parts[0]), _mm256_max_pd(a.parts[1], b.parts[1])}};
#else
    return where_less(b, a, a, b);
#endif
}

/// Counts lanes.
#if defined(__AVX512F__)
class Counts {
  public:
    void add_less(const Doubles& values, double limit) {
        add(_mm512_cmp_pd_mask(values.parts[0], _mm512_set1_pd(limit), _CMP_LT_OQ));
    }
    void add_up_to(const Doubles& values, double limit) {
        add(_mm512_cmp_pd_mask(values.parts[0], _mm512_set1_pd(limit), _CMP_LE_OQ));
    }
    /// Lanes equal to `limit` behind lane `lane`.
    void add_equal_behind(const Doubles& values, double limit, std::int64_t lane) {
        const auto behind = static_cast<__mmask8>(0xfe << lane);
        add(_mm512_mask_cmp_pd_mask(behind, values.parts[0], _mm512_set1_pd(limit), _CMP_EQ_OQ));
    }
    double sum() const { return static_cast<double>(_mm512_reduce_add_epi64(counts_)); }

  private:
    void add(__mmask8 lanes) {
        counts_ = _mm512_mask_sub_epi64(counts_, lanes, counts_, _mm512_set1_epi64(-1));
    }

    __m512i counts_ = _mm512_setzero_si512();
};
#else
class Counts {
  public:
    void add_less(const Doubles& values, double limit) {
        for (const DoublePart& part : values.parts) counts_ -= part < DoublePart{} + limit;
    }
    void add_up_to(const Doubles& values, double limit) {
        for (const DoublePart& part : values.parts) counts_ -= part <= DoublePart{} + limit;
    }
    /// Lanes equal to `limit` behind lane `lane`.
    void add_equal_behind(const Doubles& values, double limit, std::int64_t lane) {
        for (int i = 0; i < Doubles::kParts; ++i) {
            LongPart behind;
            std::memcpy(&behind, kBehind + 7 - lane + i * Doubles::kPartLanes, sizeof(behind));
            counts_ -= (values.parts[i] == DoublePart{} + limit) & behind;
        }
    }
    double sum() const {
        std::int64_t result = 0;
        for (int i = 0; i < Doubles::kPartLanes; ++i) result += counts_[i];
        return static_cast<double>(result);
    }

  private:
    static constexpr std::int64_t kBehind[15] = {0,  0,  0,  0,  0,  0,  0, 0,
                                                 -1, -1, -1, -1, -1, -1, -1};
    LongPart counts_{};
};
#endif

template <typename Vector>
Vector all(typename Vector::Number value) {
    return Vector{} + value;
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

Doubles widen(const Floats& value) {
#if defined(__AVX512F__)
    return {{__builtin_convertvector(value.parts[0], DoublePart)}};
#elif defined(__AVX2__)
    const __m256 all_lanes = value.parts[0];
    return {{_mm256_cvtps_pd(_mm256_castps256_ps128(all_lanes)),
             _mm256_cvtps_pd(_mm256_extractf128_ps(all_lanes, 1))}};
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

Doubles square_root(const Doubles& value) {
    return Doubles::each([&](int i) {
#if defined(__AVX512F__)
        return static_cast<DoublePart>(_mm512_sqrt_pd(value.parts[i]));
#elif defined(__AVX2__)
        return static_cast<DoublePart>(_mm256_sqrt_pd(value.parts[i]));
#else
        return DoublePart{square_root(value.parts[i][0]), square_root(value.parts[i][1])};
#endif
    });
}

/// The sum of the lanes, in the order that score_kernels.hpp defines.
double total(const Doubles& sums) {
#if defined(__AVX2__)
#if defined(__AVX512F__)
    const __m512d eight = sums.parts[0];
    const __m256d four = _mm512_castpd512_pd256(eight) + _mm512_extractf64x4_pd(eight, 1);
#else
    const __m256d four = sums.parts[0] + sums.parts[1];
#endif
    const __m128d two = _mm256_castpd256_pd128(four) + _mm256_extractf128_pd(four, 1);
    return two[0] + two[1];
#else
    const DoublePart two = (sums.parts[0] + sums.parts[2]) + (sums.parts[1] + sums.parts[3]);
    return two[0] + two[1];
#endif
}

float total(const Floats& sums) {
#if defined(__AVX2__)
    const __m256 eight = sums.parts[0];
    const __m128 four = _mm256_castps256_ps128(eight) + _mm256_extractf128_ps(eight, 1);
    const __m128 two = four + _mm_movehl_ps(four, four);
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
#else
    const FloatPart four = sums.parts[0] + sums.parts[1];
    return (four[0] + four[2]) + (four[1] + four[3]);
#endif
}

/// Eight floats twice: of two rows, or one after the other. Wide where the instruction set is.
#if defined(__AVX512F__)
struct TwiceEight {
    __m512 both;

    static TwiceEight of(const Floats& first, const Floats& second) {
        const __m512d low = _mm512_castpd256_pd512(_mm256_castps_pd(first.parts[0]));
        return {_mm512_castpd_ps(_mm512_insertf64x4(low, _mm256_castps_pd(second.parts[0]), 1))};
    }
    /// The same eight twice.
    static TwiceEight same(const float* from) {
        return {_mm512_castpd_ps(
            _mm512_broadcast_f64x4(_mm256_loadu_pd(reinterpret_cast<const double*>(from))))};
    }
    static TwiceEight load(const float* from) { return {_mm512_loadu_ps(from)}; }
    void store(float* to) const { _mm512_storeu_ps(to, both); }
    Floats first() const { return {{_mm512_castps512_ps256(both)}}; }
    Floats second() const {
        return {{_mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(both), 1))}};
    }
    friend TwiceEight operator+(const TwiceEight& a, const TwiceEight& b) {
        return {_mm512_add_ps(a.both, b.both)};
    }
    friend TwiceEight operator-(const TwiceEight& a, const TwiceEight& b) {
        return {_mm512_sub_ps(a.both, b.both)};
    }
    friend TwiceEight operator*(const TwiceEight& a, const TwiceEight& b) {
        return {_mm512_mul_ps(a.both, b.both)};
    }
};

TwiceEight lower(const TwiceEight& a, const TwiceEight& b) {
    return {_mm512_min_ps(a.both, b.both)};
}

TwiceEight higher(const TwiceEight& a, const TwiceEight& b) {
    return {_mm512_max_ps(a.both, b.both)};
}
#else
struct TwiceEight {
    Floats halves[2];

    static TwiceEight of(const Floats& first, const Floats& second) { return {{first, second}}; }
    /// The same eight twice.
    static TwiceEight same(const float* from) {
        const Floats eight = lmcache_fast::load<Floats>(from);
        return {{eight, eight}};
    }
    static TwiceEight load(const float* from) {
        return {{lmcache_fast::load<Floats>(from), lmcache_fast::load<Floats>(from + 8)}};
    }
    void store(float* to) const {
        lmcache_fast::store(to, halves[0]);
        lmcache_fast::store(to + 8, halves[1]);
    }
    Floats first() const { return halves[0]; }
    Floats second() const { return halves[1]; }
    friend TwiceEight operator+(const TwiceEight& a, const TwiceEight& b) {
        return {{a.halves[0] + b.halves[0], a.halves[1] + b.halves[1]}};
    }
    friend TwiceEight operator-(const TwiceEight& a, const TwiceEight& b) {
        return {{a.halves[0] - b.halves[0], a.halves[1] - b.halves[1]}};
    }
    friend TwiceEight operator*(const TwiceEight& a, const TwiceEight& b) {
        return {{a.halves[0] * b.halves[0], a.halves[1] * b.halves[1]}};
    }
};

TwiceEight lower(const TwiceEight& a, const TwiceEight& b) {
    return {{lower(a.halves[0], b.halves[0]), lower(a.halves[1], b.halves[1])}};
}

TwiceEight higher(const TwiceEight& a, const TwiceEight& b) {
    return {{higher(a.halves[0], b.halves[0]), higher(a.halves[1], b.halves[1])}};
}
#endif

/// Totals of four times two rows: out[2 * i] of the first row of sums[i], then that of the second.
void totals(const TwiceEight* sums, float* out) {
#if defined(__AVX512F__)
    // Eight become four of each: of two vectors at a time, in the order 0.0, 0.1, 1.0, 1.1.
    const auto fold = [](__m512 a, __m512 b) {
        return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
    };
    const __m512d low = _mm512_castps_pd(fold(sums[0].both, sums[1].both));
    const __m512d high = _mm512_castps_pd(fold(sums[2].both, sums[3].both));
    const __m512 pairs = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(low, high)),
                                       _mm512_castpd_ps(_mm512_unpackhi_pd(low, high)));
    const __m512 sum = _mm512_add_ps(pairs, _mm512_movehdup_ps(pairs));
    const __m512i order = _mm512_set_epi32(0, 0, 0, 0, 0, 0, 0, 0, 14, 10, 6, 2, 12, 8, 4, 0);
    _mm256_storeu_ps(out, _mm512_castps512_ps256(_mm512_permutexvar_ps(order, sum)));
#else
    for (int i = 0; i < 4; ++i) {
        out[2 * i] = total(sums[i].first());
        out[2 * i + 1] = total(sums[i].second());
    }
#endif
}

/// Totals in doubles of the eight floats and then of the second eight of each.
[[gnu::always_inline]] inline void wide_totals(const TwiceEight& a, const TwiceEight& b,
                                               double* of_a, double* of_b) {
#if defined(__AVX512F__)
    // Eight become four of each, in the order first, second.
    const auto fold = [](const TwiceEight& sums) {
        const __m512d first = widen(sums.first()).parts[0];
        const __m512d second = widen(sums.second()).parts[0];
        return _mm512_add_pd(_mm512_shuffle_f64x2(first, second, 0x44),
                             _mm512_shuffle_f64x2(first, second, 0xee));
    };
    const __m512d fours_a = fold(a);
    const __m512d fours_b = fold(b);
    const __m512d pairs = _mm512_add_pd(_mm512_shuffle_f64x2(fours_a, fours_b, 0x88),
                                        _mm512_shuffle_f64x2(fours_a, fours_b, 0xdd));
    const __m512d sum = _mm512_add_pd(pairs, _mm512_permute_pd(pairs, 0x55));
    const __m512i order = _mm512_set_epi64(0, 0, 0, 0, 6, 4, 2, 0);
    const __m256d all_four = _mm512_castpd512_pd256(_mm512_permutexvar_pd(order, sum));
    _mm_storeu_pd(of_a, _mm256_castpd256_pd128(all_four));
    _mm_storeu_pd(of_b, _mm256_extractf128_pd(all_four, 1));
#else
    of_a[0] = total(widen(a.first()));
    of_a[1] = total(widen(a.second()));
    of_b[0] = total(widen(b.first()));
    of_b[1] = total(widen(b.second()));
#endif
}

/// Added to a number of less than 2^51, rounds it to the nearest integer, ties to even.
constexpr double kToInteger = 6755399441055744.0;  // 1.5 * 2^52

/// 2^k of an integer k from -1022 to 1023, to which kToInteger was added.
Doubles power_of_two(const Doubles& shifted) {
    return Doubles::each([&](int i) {
        LongPart bits;
        std::memcpy(&bits, &shifted.parts[i], sizeof(bits));
        bits = (bits + 1023) << 52;  // what is above k's lowest 12 bits falls out
        DoublePart power;
        std::memcpy(&power, &bits, sizeof(power));
        return power;
    });
}

/// Eight elements of memory.
template <typename Type>
Floats load8(const std::byte* from) {
    alignas(64) float lanes[8];
    for (int i = 0; i < 8; ++i) lanes[i] = Type::load(from + i * Type::kBytes);
    return load<Floats>(lanes);
}

#if defined(__AVX2__)
template <>
[[maybe_unused]] Floats load8<BFloat16>(const std::byte* from) {
    const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return {{_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16))}};
}

template <>
[[maybe_unused]] Floats load8<Float16>(const std::byte* from) {
    return {{_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)))}};
}
#endif

/// Eight elements at each of two places.
template <typename Type>
TwiceEight load_two(const std::byte* first, const std::byte* second) {
    return TwiceEight::of(load8<Type>(first), load8<Type>(second));
}

#if defined(__AVX512F__)
template <>
[[maybe_unused]] TwiceEight load_two<BFloat16>(const std::byte* first, const std::byte* second) {
    const __m256i halves = _mm256_inserti128_si256(
        _mm256_castsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(first))),
        _mm_loadu_si128(reinterpret_cast<const __m128i*>(second)), 1);
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16))};
}
#endif

}  // namespace
}  // namespace lmcache_fast
