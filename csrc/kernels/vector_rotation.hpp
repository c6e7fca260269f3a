// The rotation in vectors, written once for every instruction set; bit for bit the scalar one.
//
// Isa gives:
//   Floats                       a vector of kLanes floats
//   load, multiply, add, subtract, prefetch
//   any_nan(a, b, c, d)          whether any of them has a NaN
//   Format<Type>                 2 * kLanes elements of memory as two vectors, in any fixed order:
//     load(from, a, b)
//     store(to, a, b, stream)    rounds to nearest even; kNanSafe tells whether NaNs may be stored
//     angles(from, a, b)         floats in the same order
//     kSplitsPairs               a holds the even elements and b the odd ones
// In an unnamed namespace: each kernel file compiles its own copy with its own flags.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels.hpp"
#include "scalar_rotation.hpp"
#include "stream_copy.hpp"

namespace lmcache_fast {
namespace {

constexpr std::int64_t kMaxHalf = 128;  // of the heads that are rotated in vectors

template <typename Isa, typename Type, bool kInterleaved, bool kStream>
class VectorRotation {
    using Floats = typename Isa::Floats;
    using Format = typename Isa::template Format<Type>;
    static constexpr std::int64_t kStep = 2 * Isa::kLanes;
    // Angles are wanted in the order in which pairs come, or that in which elements come.
    static constexpr std::int64_t kAngles = kInterleaved ? Isa::kLanes : kStep;

  public:
    explicit VectorRotation(const HeadShape& heads) : heads_(heads), half_(heads.rotary_dim / 2) {}

    void rows(const RotatedRow* rows, const std::byte* const* next, std::size_t count) const {
        alignas(64) float angles[kStreams][2 * kMaxHalf];
        const float* prepared[kStreams];
        for (std::size_t i = 0; i < count; ++i) {
            if (i > 0 && rows[i].cosines == rows[i - 1].cosines) {
                prepared[i] = prepared[i - 1];
                continue;
            }
            order(rows[i].cosines, angles[i]);
            order(rows[i].sines, angles[i] + half_);
            prepared[i] = angles[i];
        }
        if (takes_turns()) {
            for (std::int64_t head = 0; head < heads_.num_heads; ++head) {
                for (std::size_t i = 0; i < count; ++i)
                    rotate_head(rows[i], head, prepared[i], next[i]);
            }
            return;
        }
        for (std::size_t i = 0; i < count; ++i) {
            const std::byte* following = i + 1 < count ? rows[i + 1].source : next[0];
            for (std::int64_t head = 0; head < heads_.num_heads; ++head) {
                rotate_head(rows[i], head, prepared[i], following);
            }
        }
    }

  private:
    /// Puts whole steps of a table row in the order that Format wants.
    void order(const float* from, float* to) const {
        for (std::int64_t j = 0; j + kAngles <= half_; j += kAngles) {
            if (kInterleaved) {
                Isa::store(to + j, Isa::load(from + j));
                continue;
            }
            Floats a;
            Floats b;
            Format::angles(from + j, a, b);
            Isa::store(to + j, a);
            Isa::store(to + j + Isa::kLanes, b);
        }
    }

    void rotate_head(const RotatedRow& row, std::int64_t head, const float* angles,
                     const std::byte* following) const {
        const std::int64_t head_bytes = heads_.head_dim * Type::kBytes;
        const std::byte* source = row.source + head * head_bytes;
        std::byte* target = row.target + head * head_bytes;
        for (std::int64_t at = 0; at < head_bytes; at += 64) {
            Isa::prefetch(following + head * head_bytes + at);
        }
        const float* cosines = angles;
        const float* sines = angles + half_;
        std::int64_t j = 0;
        for (; j + kAngles <= half_; j += kAngles) {
            const bool done =
                kInterleaved
                    ? rotate_interleaved(source + 2 * j * Type::kBytes,
                                         target + 2 * j * Type::kBytes, cosines + j, sines + j)
                    : rotate_split(source + j * Type::kBytes, target + j * Type::kBytes,
                                   cosines + j, sines + j);
            if (!done) scalar(row, source, target, j, j + kAngles);
        }
        if (j < half_) scalar(row, source, target, j, half_);
        const std::int64_t rotated = heads_.rotary_dim * Type::kBytes;
        if (heads_.head_dim > heads_.rotary_dim) {
            std::memcpy(target + rotated, source + rotated,
                        static_cast<std::size_t>(head_bytes - rotated));
        }
    }

    void scalar(const RotatedRow& row, const std::byte* source, std::byte* target,
                std::int64_t begin, std::int64_t end) const {
        rotate_pairs<Type>(source, target, row.cosines, row.sines, begin, end, half_, kInterleaved);
    }

    static void rotate(Floats& x, Floats& y, Floats cosine, Floats sine) {
        const Floats turned = Isa::subtract(Isa::multiply(x, cosine), Isa::multiply(y, sine));
        y = Isa::add(Isa::multiply(y, cosine), Isa::multiply(x, sine));
        x = turned;
    }

    /// kStep pairs whose second halves stand half_ elements later. False: has a NaN, nothing done.
    bool rotate_split(const std::byte* source, std::byte* target, const float* cosines,
                      const float* sines) const {
        const std::int64_t later = half_ * Type::kBytes;
        Floats xa;
        Floats xb;
        Floats ya;
        Floats yb;
        Format::load(source, xa, xb);
        Format::load(source + later, ya, yb);
        rotate(xa, ya, Isa::load(cosines), Isa::load(sines));
        rotate(xb, yb, Isa::load(cosines + Isa::kLanes), Isa::load(sines + Isa::kLanes));
        if (!Format::kNanSafe && Isa::any_nan(xa, ya, xb, yb)) return false;
        Format::store(target, xa, xb, kStream);
        Format::store(target + later, ya, yb, kStream);
        return true;
    }

    /// kLanes pairs that stand side by side.
    bool rotate_interleaved(const std::byte* source, std::byte* target, const float* cosines,
                            const float* sines) const {
        Floats x;
        Floats y;
        Format::load(source, x, y);
        rotate(x, y, Isa::load(cosines), Isa::load(sines));
        if (!Format::kNanSafe && Isa::any_nan(x, y, x, y)) return false;
        Format::store(target, x, y, kStream);
        return true;
    }

    const HeadShape heads_;
    const std::int64_t half_;
};

template <typename Isa, typename Type>
void vector_rotate_rows(const HeadShape& heads, const RotatedRow* rows,
                        const std::byte* const* next, std::size_t count, bool stream) {
    using Format = typename Isa::template Format<Type>;
    const std::int64_t half = heads.rotary_dim / 2;
    if (half > kMaxHalf || (heads.interleaved && !Format::kSplitsPairs)) {
        scalar_rotate_rows<Type>(heads, rows, count);
    } else if (heads.interleaved) {
        VectorRotation<Isa, Type, true, false>(heads).rows(rows, next, count);
    } else if (stream && heads.rotary_dim == heads.head_dim && half % (2 * Isa::kLanes) == 0) {
        VectorRotation<Isa, Type, false, true>(heads).rows(rows, next, count);
    } else {
        VectorRotation<Isa, Type, false, false>(heads).rows(rows, next, count);
    }
}

template <typename Isa>
void vector_rotate(const HeadShape& heads, const RotatedRow* rows, const std::byte* const* next,
                   std::size_t count, bool stream) {
    switch (heads.element) {
        case Element::kBFloat16:
            return vector_rotate_rows<Isa, BFloat16>(heads, rows, next, count, stream);
        case Element::kFloat16:
            return vector_rotate_rows<Isa, Float16>(heads, rows, next, count, stream);
        case Element::kFloat32:
            return vector_rotate_rows<Isa, Float32>(heads, rows, next, count, stream);
    }
}

}  // namespace
}  // namespace lmcache_fast
