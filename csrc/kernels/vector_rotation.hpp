// The rotation in vectors, written once for every instruction set; bit for bit the scalar one.
//
// Isa gives:
//   Floats                       a vector of kLanes floats
//   load, multiply, add, subtract, prefetch, stream_line
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

/// kHalf: of the heads, where it is known before; they are rotated as a whole then.
template <typename Isa, typename Type, bool kInterleaved, bool kStream, std::int64_t kHalf = 0>
class VectorRotation {
    using Floats = typename Isa::Floats;
    using Format = typename Isa::template Format<Type>;
    static constexpr std::int64_t kStep = 2 * Isa::kLanes;
    // Angles are wanted in the order in which pairs come, or that in which elements come.
    static constexpr std::int64_t kAngles = kInterleaved ? Isa::kLanes : kStep;

  public:
    VectorRotation(const HeadShape& heads, const ValueRows* values, bool stream)
        : heads_(heads),
          half_(kHalf != 0 ? kHalf : heads.rotary_dim / 2),
          head_bytes_(heads.head_dim * Type::kBytes),
          values_(values),
          stream_values_(stream && head_bytes() % 64 == 0) {}

    void rows(const RotatedRow* rows, const std::byte* const* next, std::size_t count) const {
        alignas(64) float angles[kStreams][2 * kMaxHalf];
        const float* prepared[kStreams];
        for (std::size_t i = 0; i < count; ++i) {
            if (i > 0 && rows[i].cosines == rows[i - 1].cosines) {
                prepared[i] = prepared[i - 1];
                continue;
            }
            order(rows[i].cosines, angles[i]);
            order(rows[i].sines, angles[i] + half());
            prepared[i] = angles[i];
        }
        if (takes_turns()) {
            for (std::int64_t head = 0; head < heads_.num_heads; ++head) {
                for (std::size_t i = 0; i < count; ++i) {
                    move_head(rows[i], head, prepared[i], next[i], true);
                }
            }
            return;
        }
        for (std::size_t i = 0; i < count; ++i) {
            const std::byte* following = i + 1 < count ? rows[i + 1].source : next[0];
            for (std::int64_t head = 0; head < heads_.num_heads; ++head) {
                move_head(rows[i], head, prepared[i], following, false);
            }
        }
    }

  private:
    std::int64_t half() const { return kHalf != 0 ? kHalf : half_; }
    std::int64_t head_bytes() const { return kHalf != 0 ? 2 * kHalf * Type::kBytes : head_bytes_; }

    /// Puts whole steps of a table row in the order that Format wants.
    void order(const float* from, float* to) const {
        for (std::int64_t j = 0; j + kAngles <= half(); j += kAngles) {
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

    void move_head(const RotatedRow& row, std::int64_t head, const float* angles,
                   const std::byte* following, bool turns) const {
        const std::int64_t begin = head * head_bytes();
        fetch(row.source, following, begin, turns);
        rotate_head(row, row.source + begin, row.target + begin, angles);
        if (values_ == nullptr) return;
        const std::byte* const source = row.source + values_->source;
        std::byte* const target = row.target + values_->target;
        fetch(source, following + values_->source, begin, turns);
        if (!stream_values_) {
            std::memcpy(target + begin, source + begin, static_cast<std::size_t>(head_bytes()));
            return;
        }
        for (std::int64_t at = begin; at < begin + head_bytes(); at += 64) {
            Isa::stream_line(source + at, target + at);
        }
    }

    void rotate_head(const RotatedRow& row, const std::byte* source, std::byte* target,
                     const float* angles) const {
        const float* cosines = angles;
        const float* sines = angles + half();
        std::int64_t j = 0;
        for (; j + kAngles <= half(); j += kAngles) {
            const bool done =
                kInterleaved
                    ? rotate_interleaved(source + 2 * j * Type::kBytes,
                                         target + 2 * j * Type::kBytes, cosines + j, sines + j)
                    : rotate_split(source + j * Type::kBytes, target + j * Type::kBytes,
                                   cosines + j, sines + j);
            if (!done) scalar(row, source, target, j, j + kAngles);
        }
        if (j < half()) scalar(row, source, target, j, half());
        const std::int64_t rotated = heads_.rotary_dim * Type::kBytes;
        if (heads_.head_dim > heads_.rotary_dim) {
            std::memcpy(target + rotated, source + rotated,
                        static_cast<std::size_t>(head_bytes() - rotated));
        }
    }

    /// Fetches a head's worth: of the following row, or a little further on in this one.
    void fetch(const std::byte* source, const std::byte* following, std::int64_t begin,
               bool turns) const {
        const std::int64_t row_bytes = heads_.num_heads * head_bytes();
        constexpr auto kAhead = static_cast<std::int64_t>(kAheadBytes);
        if (turns && row_bytes > kAhead && head_bytes() <= kAhead) {
            begin += kAhead;
            if (begin < row_bytes) {
                following = source;
            } else {
                begin -= row_bytes;
            }
        }
        for (std::int64_t at = begin; at < begin + head_bytes(); at += 64) {
            Isa::prefetch(following + at);
        }
    }

    void scalar(const RotatedRow& row, const std::byte* source, std::byte* target,
                std::int64_t begin, std::int64_t end) const {
        rotate_pairs<Type>(source, target, row.cosines, row.sines, begin, end, half(),
                           kInterleaved);
    }

    static void rotate(Floats& x, Floats& y, Floats cosine, Floats sine) {
        const Floats turned = Isa::subtract(Isa::multiply(x, cosine), Isa::multiply(y, sine));
        y = Isa::add(Isa::multiply(y, cosine), Isa::multiply(x, sine));
        x = turned;
    }

    /// kStep pairs whose second halves stand half() elements later. False: has a NaN, nothing done.
    bool rotate_split(const std::byte* source, std::byte* target, const float* cosines,
                      const float* sines) const {
        const std::int64_t later = half() * Type::kBytes;
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
    const std::int64_t head_bytes_;
    const ValueRows* const values_;
    const bool stream_values_;
};

template <typename Isa, typename Type>
void vector_rotate_rows(const HeadShape& heads, const RotatedRow* rows,
                        const std::byte* const* next, std::size_t count, bool stream,
                        const ValueRows* values) {
    using Format = typename Isa::template Format<Type>;
    const std::int64_t half = heads.rotary_dim / 2;
    if (half > kMaxHalf || (heads.interleaved && !Format::kSplitsPairs)) {
        scalar_rotate_rows<Type>(heads, rows, count);
        if (values != nullptr) copy_values(heads, rows, count, *values);
    } else if (heads.interleaved) {
        VectorRotation<Isa, Type, true, false>(heads, values, stream).rows(rows, next, count);
    } else if (stream && half == 64 && heads.head_dim == 128) {
        VectorRotation<Isa, Type, false, true, 64>(heads, values, stream).rows(rows, next, count);
    } else if (stream && heads.rotary_dim == heads.head_dim && half % (2 * Isa::kLanes) == 0) {
        VectorRotation<Isa, Type, false, true>(heads, values, stream).rows(rows, next, count);
    } else {
        VectorRotation<Isa, Type, false, false>(heads, values, stream).rows(rows, next, count);
    }
}

template <typename Isa>
void vector_rotate(const HeadShape& heads, const RotatedRow* rows, const std::byte* const* next,
                   std::size_t count, bool stream, const ValueRows* values) {
    switch (heads.element) {
        case Element::kBFloat16:
            return vector_rotate_rows<Isa, BFloat16>(heads, rows, next, count, stream, values);
        case Element::kFloat16:
            return vector_rotate_rows<Isa, Float16>(heads, rows, next, count, stream, values);
        case Element::kFloat32:
            return vector_rotate_rows<Isa, Float32>(heads, rows, next, count, stream, values);
    }
}

}  // namespace
}  // namespace lmcache_fast
