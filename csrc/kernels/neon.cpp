// NEON: every aarch64 processor. Streaming is a pair of stores with a hint.
#include <arm_neon.h>

#include "stream_copy.hpp"
#include "vector_rotation.hpp"

namespace lmcache_fast {
namespace {

void store_bits(std::byte* to, uint16x8_t bits) {
    vst1q_u8(reinterpret_cast<std::uint8_t*>(to), vreinterpretq_u8_u16(bits));
}

uint16x8_t load_bits(const std::byte* from) {
    return vreinterpretq_u16_u8(vld1q_u8(reinterpret_cast<const std::uint8_t*>(from)));
}

struct Neon {
    using Floats = float32x4_t;
    static constexpr std::int64_t kLanes = 4;

    static Floats load(const float* from) { return vld1q_f32(from); }
    static void store(float* to, Floats value) { vst1q_f32(to, value); }
    static Floats multiply(Floats a, Floats b) { return vmulq_f32(a, b); }
    static Floats add(Floats a, Floats b) { return vaddq_f32(a, b); }
    static Floats subtract(Floats a, Floats b) { return vsubq_f32(a, b); }
    static bool any_nan(Floats a, Floats b, Floats c, Floats d) {
        const uint32x4_t first = vandq_u32(vceqq_f32(a, a), vceqq_f32(b, b));
        const uint32x4_t second = vandq_u32(vceqq_f32(c, c), vceqq_f32(d, d));
        return vminvq_u32(vandq_u32(first, second)) == 0;
    }
    static void prefetch(const std::byte* at) { __builtin_prefetch(at); }
    static void stream_line(const std::byte* from, std::byte* to) {
        asm volatile(
            "ldp q0, q1, [%0]\n\t"
            "ldp q2, q3, [%0, #32]\n\t"
            "stnp q0, q1, [%1]\n\t"
            "stnp q2, q3, [%1, #32]"
            :
            : "r"(from), "r"(to)
            : "v0", "v1", "v2", "v3", "memory");
    }

    template <typename Type>
    struct Format;
};

// A bfloat16 is the upper half of a float: even elements are shifted up, odd ones masked.
template <>
struct Neon::Format<BFloat16> {
    static constexpr bool kNanSafe = false;
    static constexpr bool kSplitsPairs = true;
    static void load(const std::byte* from, float32x4_t& a, float32x4_t& b) {
        const uint32x4_t bits = vreinterpretq_u32_u16(load_bits(from));
        a = vreinterpretq_f32_u32(vshlq_n_u32(bits, 16));
        b = vreinterpretq_f32_u32(vandq_u32(bits, vdupq_n_u32(0xffff0000U)));
    }
    static void store(std::byte* to, float32x4_t a, float32x4_t b, bool) {
        const uint32x4_t even = vshrq_n_u32(round(a), 16);
        const uint32x4_t both = vbslq_u32(vdupq_n_u32(0xffff0000U), round(b), even);
        store_bits(to, vreinterpretq_u16_u32(both));
    }
    static void angles(const float* from, float32x4_t& a, float32x4_t& b) {
        const float32x4x2_t split = vld2q_f32(from);
        a = split.val[0];
        b = split.val[1];
    }

  private:
    static uint32x4_t round(float32x4_t value) {
        const uint32x4_t bits = vreinterpretq_u32_f32(value);
        const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
        return vaddq_u32(vaddq_u32(bits, vdupq_n_u32(0x7fff)), odd);
    }
};

template <>
struct Neon::Format<Float16> {
    static constexpr bool kNanSafe = true;
    static constexpr bool kSplitsPairs = false;
    static void load(const std::byte* from, float32x4_t& a, float32x4_t& b) {
        const float16x8_t halves = vreinterpretq_f16_u16(load_bits(from));
        a = vcvt_f32_f16(vget_low_f16(halves));
        b = vcvt_f32_f16(vget_high_f16(halves));
    }
    static void store(std::byte* to, float32x4_t a, float32x4_t b, bool) {
        store_bits(to, vreinterpretq_u16_f16(vcombine_f16(vcvt_f16_f32(a), vcvt_f16_f32(b))));
    }
    static void angles(const float* from, float32x4_t& a, float32x4_t& b) {
        a = vld1q_f32(from);
        b = vld1q_f32(from + 4);
    }
};

template <>
struct Neon::Format<Float32> {
    static constexpr bool kNanSafe = true;
    static constexpr bool kSplitsPairs = false;
    static void load(const std::byte* from, float32x4_t& a, float32x4_t& b) {
        a = vreinterpretq_f32_u16(load_bits(from));
        b = vreinterpretq_f32_u16(load_bits(from + 16));
    }
    static void store(std::byte* to, float32x4_t a, float32x4_t b, bool) {
        store_bits(to, vreinterpretq_u16_f32(a));
        store_bits(to + 16, vreinterpretq_u16_f32(b));
    }
    static void angles(const float* from, float32x4_t& a, float32x4_t& b) {
        a = vld1q_f32(from);
        b = vld1q_f32(from + 4);
    }
};

bool supported() {
    return true;
}

void fence() {
    asm volatile("dmb ishst" ::: "memory");
}

}  // namespace

const Kernels kNeonKernels{"neon", supported, takes_turns, stream_copy<Neon>, vector_rotate<Neon>,
                           fence};

}  // namespace lmcache_fast
