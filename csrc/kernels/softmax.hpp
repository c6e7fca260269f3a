// Softmax in float32, the same on every machine.
// In an unnamed namespace: each kernel file compiles its own copy with its own flags.
#pragma once

#include "row_blocks.hpp"

namespace lmcache_fast {
namespace {

/// exp of numbers up to 0: e^x = 2^k * e^r, by r's Taylor series; 0 where it is below 2^-124.
[[gnu::always_inline]] inline Floats exponential(const Floats& x) {
    constexpr float kSeries[] = {1.0F / 720, 1.0F / 120, 1.0F / 24, 1.0F / 6, 0.5F, 1, 1};
    const Floats lowest = all<Floats>(-86);
    const Floats clamped = higher(x, lowest);
    const Floats shifted = fused(clamped, all<Floats>(1.44269504F), all<Floats>(kToInteger));
    const Floats k = shifted - all<Floats>(kToInteger);
    // ln 2 in two parts; the product of k and the first is exact.
    const Floats coarse = fused(k, all<Floats>(-0.693145752F), clamped);
    const Floats r = fused(k, all<Floats>(-1.42860677e-6F), coarse);
    Floats sum = all<Floats>(1.0F / 5040);
    for (const float each : kSeries) sum = fused(sum, r, all<Floats>(each));
    return where_less(x, lowest, Floats{}, times_power_of_two(sum, shifted));
}

/// Not a number: as low as can be. Infinity: as much as there are numbers for.
Floats finite(const Floats& value) {
    return lower(higher(value, all<Floats>(-kMost)), all<Floats>(kMost));
}

/// Makes `count` numbers, which are made finite first, e^(scale * (number - the highest)), and what
/// is behind them, up to a multiple of sixteen, 0. Returns the inverse of their sum: a softmax is
/// the product of both.
[[gnu::always_inline]] inline float softmax(float* values, std::int64_t count, float scale) {
    Floats most = all<Floats>(-kMost);
    fill(values + count, padded(count) - count, -kMost);
    for (std::int64_t i = 0; i < count; i += kLanes) {
        const Floats value = finite(load<Floats>(values + i));
        store(values + i, value);
        most = higher(value, most);
    }
    fill(values + count, padded(count) - count, -__builtin_inff());
    const Floats highest = all<Floats>(highest_lane(most));
    Doubles sum{};
    for (std::int64_t i = 0; i < count; i += kLanes) {
        const Floats below = load<Floats>(values + i) - highest;
        const Floats weight = exponential(below * all<Floats>(scale));
        store(values + i, weight);
        sum = sum + widen(weight);
    }
    return static_cast<float>(1.0 / total(sum));
}

}  // namespace
}  // namespace lmcache_fast
