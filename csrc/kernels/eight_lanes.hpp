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
    /// a where it is a number, else no.
    friend Eight where_number(const Eight& a, const Eight& no) {
        return each([&](int i) { return a.parts[i] == a.parts[i] ? a.parts[i] : no.parts[i]; });
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

/// Counts lanes.
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

}  // namespace
}  // namespace lmcache_fast
