// The rotation as it is defined, one pair after the other. Every vector kernel gives the same bits.
// In an unnamed namespace: each kernel file compiles its own copy with its own flags.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels.hpp"

namespace lmcache_fast {
namespace {

struct BFloat16 {
    static constexpr std::int64_t kBytes = 2;
    static float load(const std::byte* from) {
        std::uint16_t half = 0;
        std::memcpy(&half, from, 2);
        const std::uint32_t bits = static_cast<std::uint32_t>(half) << 16;
        float value = 0;
        std::memcpy(&value, &bits, 4);
        return value;
    }
    static void store(std::byte* to, float value) {
        std::uint32_t bits = 0;
        std::memcpy(&bits, &value, 4);
        if ((bits & 0x7fffffffU) > 0x7f800000U) {
            bits |= 0x00400000U;  // rounding could carry a NaN over into infinity or zero
        } else {
            bits += 0x7fffU + ((bits >> 16) & 1U);
        }
        const auto half = static_cast<std::uint16_t>(bits >> 16);
        std::memcpy(to, &half, 2);
    }
};

struct Float16 {
    static constexpr std::int64_t kBytes = 2;
    static float load(const std::byte* from) {
        std::uint16_t half = 0;
        std::memcpy(&half, from, 2);
        const std::uint32_t sign = static_cast<std::uint32_t>(half & 0x8000U) << 16;
        const std::uint32_t magnitude = half & 0x7fffU;
        std::uint32_t bits = 0;
        if (magnitude >= 0x7c00U) {  // infinity, or a NaN, which becomes quiet
            bits = 0x7f800000U | ((magnitude & 0x3ffU) << 13);
            if (magnitude > 0x7c00U) bits |= 0x00400000U;
        } else if (magnitude >= 0x400U) {
            bits = (magnitude << 13) + (112U << 23);
        } else {  // subnormal: a multiple of 2^-24
            const float small = static_cast<float>(magnitude) * 5.9604644775390625e-8F;
            std::memcpy(&bits, &small, 4);
        }
        bits |= sign;
        float value = 0;
        std::memcpy(&value, &bits, 4);
        return value;
    }
    static void store(std::byte* to, float value) {
        std::uint32_t bits = 0;
        std::memcpy(&bits, &value, 4);
        const std::uint32_t sign = (bits >> 16) & 0x8000U;
        bits &= 0x7fffffffU;
        std::uint32_t half = 0;
        if (bits > 0x7f800000U) {
            half = 0x7e00U | ((bits >> 13) & 0x3ffU);
        } else if (bits >= 0x47800000U) {  // 2^16 and above; what rounds up to it carries by itself
            half = 0x7c00U;
        } else if (bits >= 0x38800000U) {
            bits += 0xfffU + ((bits >> 13) & 1U);
            half = (bits - (112U << 23)) >> 13;
        } else {  // subnormal: adding 0.5 leaves it, rounded to nearest even, in the low bits
            float magnitude = 0;
            std::memcpy(&magnitude, &bits, 4);
            magnitude += 0.5F;
            std::memcpy(&half, &magnitude, 4);
            half -= 0x3f000000U;
        }
        const auto result = static_cast<std::uint16_t>(sign | half);
        std::memcpy(to, &result, 2);
    }
};

struct Float32 {
    static constexpr std::int64_t kBytes = 4;
    static float load(const std::byte* from) {
        float value = 0;
        std::memcpy(&value, from, 4);
        return value;
    }
    static void store(std::byte* to, float value) { std::memcpy(to, &value, 4); }
};

/// Pairs [begin, end) of one head.
template <typename Type>
void rotate_pairs(const std::byte* source, std::byte* target, const float* cosines,
                  const float* sines, std::int64_t begin, std::int64_t end, std::int64_t half,
                  bool interleaved) {
    for (std::int64_t j = begin; j < end; ++j) {
        const std::int64_t first = (interleaved ? 2 * j : j) * Type::kBytes;
        const std::int64_t second = (interleaved ? 2 * j + 1 : j + half) * Type::kBytes;
        const float x = Type::load(source + first);
        const float y = Type::load(source + second);
        Type::store(target + first, x * cosines[j] - y * sines[j]);
        Type::store(target + second, y * cosines[j] + x * sines[j]);
    }
}

template <typename Type>
void scalar_rotate_rows(const HeadShape& heads, const RotatedRow* rows, std::size_t count) {
    const std::int64_t head_bytes = heads.head_dim * Type::kBytes;
    const std::int64_t rotary_bytes = heads.rotary_dim * Type::kBytes;
    for (std::size_t row = 0; row < count; ++row) {
        for (std::int64_t head = 0; head < heads.num_heads; ++head) {
            const std::byte* source = rows[row].source + head * head_bytes;
            std::byte* target = rows[row].target + head * head_bytes;
            rotate_pairs<Type>(source, target, rows[row].cosines, rows[row].sines, 0,
                               heads.rotary_dim / 2, heads.rotary_dim / 2, heads.interleaved);
            std::memcpy(target + rotary_bytes, source + rotary_bytes,
                        static_cast<std::size_t>(head_bytes - rotary_bytes));
        }
    }
}

[[maybe_unused]] void copy_values(const HeadShape& heads, const RotatedRow* rows, std::size_t count,
                                  const ValueRows& values) {
    for (std::size_t i = 0; i < count; ++i) {
        std::memcpy(rows[i].target + values.target, rows[i].source + values.source,
                    static_cast<std::size_t>(heads.row_bytes()));
    }
}

[[maybe_unused]] void scalar_rotate(const HeadShape& heads, const RotatedRow* rows,
                                    std::size_t count) {
    switch (heads.element) {
        case Element::kBFloat16:
            return scalar_rotate_rows<BFloat16>(heads, rows, count);
        case Element::kFloat16:
            return scalar_rotate_rows<Float16>(heads, rows, count);
        case Element::kFloat32:
            return scalar_rotate_rows<Float32>(heads, rows, count);
    }
}

}  // namespace
}  // namespace lmcache_fast
