// The scorers, written once for all instruction sets, in vectors of eight: one lane a partial sum.
// In an unnamed namespace: each kernel file compiles its own copy with its own flags. For the same
// reason nothing here is taken from <algorithm> or <cmath>.
#pragma once

#include <cfloat>

#include "eight_lanes.hpp"
#include "score_kernels.hpp"

namespace lmcache_fast {
namespace {

constexpr double kInfinity = __builtin_inf();
constexpr std::int64_t kRowsAhead =
    4;  // are fetched, for processors that do not do it by themselves

template <typename Number>
void fill(Number* begin, std::int64_t count, Number value) {
    for (std::int64_t i = 0; i < count; ++i) begin[i] = value;
}

/// The first of `count` elements of memory, at most eight, and zeros behind them.
template <typename Type>
[[gnu::always_inline]] inline Floats load_some(const std::byte* from, std::int64_t count) {
    if (count >= 8) return load8<Type>(from);
    alignas(32) std::byte rest[8 * Type::kBytes] = {};
    std::memcpy(rest, from, static_cast<std::size_t>(count * Type::kBytes));
    return load8<Type>(rest);
}

/// Calls body(vector, its first element's index) for the elements of a head, zeros behind them.
template <typename Type, typename Body>
[[gnu::always_inline]] inline void for_each8(const std::byte* head, std::int64_t head_dim,
                                             const Body& body) {
    std::int64_t i = 0;
    for (; i + 8 <= head_dim; i += 8) body(load8<Type>(head + i * Type::kBytes), i);
    if (i < head_dim) body(load_some<Type>(head + i * Type::kBytes, head_dim - i), i);
}

/// The same for the same head of two rows.
template <typename Type, typename Body>
[[gnu::always_inline]] inline void for_each8(const std::byte* first, const std::byte* second,
                                             std::int64_t head_dim, const Body& body) {
    std::int64_t i = 0;
    for (; i + 8 <= head_dim; i += 8) {
        body(load_two<Type>(first + i * Type::kBytes, second + i * Type::kBytes), i);
    }
    if (i == head_dim) return;
    body(TwiceEight::of(load_some<Type>(first + i * Type::kBytes, head_dim - i),
                        load_some<Type>(second + i * Type::kBytes, head_dim - i)),
         i);
}

/// The length of a head.
template <typename Type>
[[gnu::always_inline]] inline double norm_of(const std::byte* head, std::int64_t head_dim) {
    Floats sums{};
    for_each8<Type>(head, head_dim, [&](Floats x, std::int64_t) { sums = sums + x * x; });
    return square_root(total(widen(sums)));
}

/// The heads of one token after the other.
class HeadReduction {
  public:
    explicit HeadReduction(Reduce reduce) : max_(reduce == Reduce::kMax) {}

    void add(double score) {
        if (count_++ == 0) {
            value_ = score;
        } else if (!max_) {
            value_ += score;
        } else if (score > value_ || score != score) {
            value_ = score;
        }
    }
    double value() const { return max_ ? value_ : value_ / static_cast<double>(count_); }

  private:
    bool max_;
    std::int64_t count_ = 0;
    double value_ = 0;
};

/// Walks along the rows without a division for each.
class Cursor {
  public:
    Cursor(const ScoredRows& rows, std::int64_t token)
        : rows_(&rows), chunk_(token / rows.tokens_per_chunk) {
        if (token < rows.num_tokens) enter(token % rows.tokens_per_chunk);
    }
    const std::byte* row() const { return row_; }
    const std::byte* head(std::int64_t index) const { return row_ + rows_->head_offsets[index]; }
    /// Fetches a head `rows` rows further on, if it is in the same chunk.
    void prefetch(std::int64_t index, std::int64_t head_bytes, std::int64_t rows) const {
        const std::byte* const from = head(index) + rows * rows_->token_stride;
        for (std::int64_t i = 0; i < head_bytes; i += 64) __builtin_prefetch(from + i);
    }
    void next() {
        row_ += rows_->token_stride;
        if (--left_ > 0) return;
        if (++chunk_ * rows_->tokens_per_chunk < rows_->num_tokens) enter(0);
    }

  private:
    void enter(std::int64_t token) {
        row_ = rows_->bases[chunk_] + rows_->offset + token * rows_->token_stride;
        left_ = rows_->tokens_per_chunk - token;
    }

    const ScoredRows* rows_;
    std::int64_t chunk_;
    std::int64_t left_ = 0;
    const std::byte* row_ = nullptr;
};

template <typename Type>
void knorm_rows(const ScoredRows& keys, std::int64_t begin, std::int64_t end, Reduce reduce,
                double* out) {
    Cursor at(keys, begin);
    for (std::int64_t token = begin; token < end; ++token, at.next()) {
        HeadReduction heads(reduce);
        for (std::int64_t head = 0; head < keys.num_heads; ++head) {
            at.prefetch(head, keys.head_dim * Type::kBytes, kRowsAhead);
            heads.add(-norm_of<Type>(at.head(head), keys.head_dim));
        }
        *out++ = heads.value();
    }
}

template <typename Type>
void keydiff_rows(const ScoredRows& keys, Reduce reduce, std::byte* scratch, double* out) {
    const std::int64_t dim = padded(keys.head_dim);
    const std::int64_t tokens = keys.num_tokens;
    double* const norms = reinterpret_cast<double*>(scratch);  // [tokens, heads]
    double* const lengths = norms + tokens * keys.num_heads;
    float* const sums = reinterpret_cast<float*>(lengths + keys.num_heads);  // [heads, 8, dim]
    fill(sums, keys.num_heads * 8 * dim, 0.0F);
    Cursor at(keys, 0);
    for (std::int64_t token = 0; token < tokens; ++token, at.next()) {
        for (std::int64_t head = 0; head < keys.num_heads; ++head) {
            at.prefetch(head, keys.head_dim * Type::kBytes, kRowsAhead);
            const double norm = norm_of<Type>(at.head(head), keys.head_dim);
            norms[token * keys.num_heads + head] = norm;
            // What has no direction gives none: zeros, and keys that are not finite.
            if (!(norm > 0 && norm < kInfinity)) continue;
            const auto inverse = static_cast<float>(1.0 / norm);
            float* const own = sums + (head * 8 + token % 8) * dim;
            for_each8<Type>(at.head(head), keys.head_dim, [&](Floats x, std::int64_t i) {
                store(own + i, load<Floats>(own + i) + x * inverse);
            });
        }
    }
    for (std::int64_t head = 0; head < keys.num_heads; ++head) {
        float* const anchor = sums + head * 8 * dim;  // the partial sums become the anchor
        Doubles squares{};
        for (std::int64_t i = 0; i < dim; i += 8) {
            Doubles lanes[8];
            for (int j = 0; j < 8; ++j) lanes[j] = widen(load<Floats>(anchor + j * dim + i));
            const Doubles mean = (((lanes[0] + lanes[4]) + (lanes[2] + lanes[6])) +
                                  ((lanes[1] + lanes[5]) + (lanes[3] + lanes[7]))) /
                                 all<Doubles>(static_cast<double>(tokens));
            double wide[8];
            store(wide, mean);
            for (int j = 0; j < 8; ++j) anchor[i + j] = static_cast<float>(wide[j]);
            squares = squares + mean * mean;
        }
        const double length = square_root(total(squares));
        lengths[head] = length > 1e-8 ? length : 1e-8;
    }
    at = Cursor(keys, 0);
    for (std::int64_t token = 0; token < tokens; ++token, at.next()) {
        HeadReduction heads(reduce);
        for (std::int64_t head = 0; head < keys.num_heads; ++head) {
            at.prefetch(head, keys.head_dim * Type::kBytes, kRowsAhead);
            const float* anchor = sums + head * 8 * dim;
            Floats products{};
            for_each8<Type>(at.head(head), keys.head_dim, [&](Floats x, std::int64_t i) {
                products = products + x * load<Floats>(anchor + i);
            });
            const double norm = norms[token * keys.num_heads + head];
            heads.add(-(total(widen(products)) / ((norm > 1e-8 ? norm : 1e-8) * lengths[head])));
        }
        out[token] = heads.value();
    }
}

/// Not a number: as low as can be. Infinity: as much as there are numbers for.
Doubles finite(Doubles value) {
    return lower(higher(value, all<Doubles>(-DBL_MAX)), all<Doubles>(DBL_MAX));
}

/// exp of numbers up to 0, the same on every machine: e^x = 2^k * e^r.
[[gnu::always_inline]] inline Doubles exponential(Doubles x) {
    constexpr double kFactorials[] = {3628800, 362880, 40320, 5040, 720, 120, 24, 6, 2, 1, 1};
    const Doubles lowest = all<Doubles>(-708);  // below it 0
    const Doubles clamped = higher(lowest, x);
    const Doubles shifted = clamped * 1.4426950408889634 + kToInteger;
    const Doubles k = shifted - kToInteger;
    const Doubles r = (clamped - k * 6.93147180369123816490e-01) - k * 1.90821492927058770002e-10;
    Doubles sum = all<Doubles>(1.0 / 39916800);
    for (const double factorial : kFactorials) sum = sum * r + 1 / factorial;
    return where_less(x, lowest, all<Doubles>(0), sum * power_of_two(shifted));
}

/// Softmax of `count` numbers, numbers(i) the eight from i on, that are made finite first; returns
/// the factor that the caller is to multiply it by. What is behind them, up to a multiple of eight,
/// becomes 0.
template <typename Numbers>
[[gnu::always_inline]] inline double softmax(double* values, std::int64_t count,
                                             const Numbers& numbers) {
    Doubles most = all<Doubles>(-DBL_MAX);
    for (std::int64_t i = 0; i < count; i += 8) {
        Doubles value = finite(numbers(i));
        store(values + i, value);
        if (i + 8 > count) {
            fill(values + count, i + 8 - count, -DBL_MAX);
            value = load<Doubles>(values + i);
        }
        most = higher(value, most);
    }
    alignas(64) double lanes[8];
    store(lanes, most);
    double highest = lanes[0];
    for (const double lane : lanes) highest = lane > highest ? lane : highest;
    fill(values + count, padded(count) - count, -kInfinity);
    Doubles sums{};
    for (std::int64_t i = 0; i < count; i += 8) {
        const Doubles e = exponential(load<Doubles>(values + i) - highest);
        store(values + i, e);
        sums = sums + e;
    }
    return 1.0 / total(sums);
}

/// Spread of each token of a partition against the range of the partition behind it, as softmax.
template <typename Type>
void lag_spread_rows(const ScoredRows& rows, std::int64_t begin, std::int64_t lag,
                     std::byte* scratch, double* out) {
    const std::int64_t dim = padded(rows.head_dim);
    const std::int64_t channels = rows.num_heads * dim;
    double* const of_squares = reinterpret_cast<double*>(scratch);  // as out
    float* const low = reinterpret_cast<float*>(of_squares + rows.num_heads * padded(lag));
    float* const inverse = low + channels;  // first the highest values
    fill(low, channels, __builtin_inff());
    fill(inverse, channels, -__builtin_inff());
    Cursor next(rows, begin + lag);
    constexpr std::int64_t kTogether = 4;
    for (std::int64_t token = 0; token < lag; token += kTogether) {
        const std::byte* together[kTogether];  // the last one again where there are no more
        for (std::int64_t j = 0; j < kTogether; ++j) {
            together[j] = next.head(0);
            if (token + j < lag - 1) next.next();
        }
        for (std::int64_t head = 0; head < rows.num_heads; ++head) {
            const std::int64_t offset = rows.head_offsets[head] - rows.head_offsets[0];
            for (std::int64_t j = 1; j <= kTogether; ++j) {
                next.prefetch(head, rows.head_dim * Type::kBytes, j);
            }
            std::int64_t i = 0;
            for (; i + 16 <= rows.head_dim; i += 16) {
                const std::int64_t channel = head * dim + i;
                TwiceEight l = TwiceEight::load(low + channel);
                TwiceEight h = TwiceEight::load(inverse + channel);
                for (const std::byte* row : together) {
                    const std::byte* const from = row + offset + i * Type::kBytes;
                    const TwiceEight x = load_two<Type>(from, from + 8 * Type::kBytes);
                    l = lower(x, l);
                    h = higher(x, h);
                }
                l.store(low + channel);
                h.store(inverse + channel);
            }
            for (; i < rows.head_dim; i += 8) {
                const std::int64_t channel = head * dim + i;
                const std::int64_t count = rows.head_dim - i;
                Floats l = load<Floats>(low + channel);
                Floats h = load<Floats>(inverse + channel);
                for (const std::byte* row : together) {
                    const Floats x = load_some<Type>(row + offset + i * Type::kBytes, count);
                    l = lower(x, l);
                    h = higher(x, h);
                }
                store(low + channel, l);
                store(inverse + channel, h);
            }
        }
    }
    for (std::int64_t i = 0; i < channels; ++i) {
        const float range = inverse[i] - low[i];
        const float one = 1.0F / range;
        // A channel that does not vary, or more than numbers can, says nothing.
        const bool good = (range > 0) & (range <= FLT_MAX) & (one <= FLT_MAX);
        inverse[i] = good ? one : 0.0F;
        low[i] = good ? low[i] : 0.0F;
    }
    Cursor at(rows, begin);
    const std::int64_t head_bytes = rows.head_dim * Type::kBytes;
    const auto count = static_cast<double>(rows.head_dim);
    for (std::int64_t token = 0; token < lag; token += 2) {
        const std::byte* const first = at.row();
        at.next();
        const bool two = token + 1 < lag;
        const std::byte* const second = two ? at.row() : first;
        for (std::int64_t head = 0; head < rows.num_heads; ++head) {
            const std::int64_t offset = rows.head_offsets[head];
            for (std::int64_t j = kRowsAhead - 1; j <= kRowsAhead; ++j) {
                at.prefetch(head, head_bytes, j);
            }
            TwiceEight sums = TwiceEight::of(all<Floats>(0), all<Floats>(0));
            TwiceEight squares = sums;
            for_each8<Type>(first + offset, second + offset, rows.head_dim,
                            [&](const TwiceEight& x, std::int64_t i) {
                                const std::int64_t channel = head * dim + i;
                                const TwiceEight z = (x - TwiceEight::same(low + channel)) *
                                                     TwiceEight::same(inverse + channel);
                                sums = sums + z;
                                squares = squares + z * z;
                            });
            const std::int64_t place = head * padded(lag) + token;  // there is room for a second
            wide_totals(sums, squares, out + place, of_squares + place);
        }
        if (two) at.next();
    }
    for (std::int64_t head = 0; head < rows.num_heads; ++head) {
        double* const spread = out + head * padded(lag);
        const double* const own = of_squares + head * padded(lag);
        for (std::int64_t i = 0; i < lag; i += 8) {
            const Doubles sum = load<Doubles>(spread + i);
            const Doubles variance = (load<Doubles>(own + i) - sum * sum / all<Doubles>(count)) /
                                     all<Doubles>(count > 2 ? count - 1 : 1);
            const Doubles none = all<Doubles>(0);
            store(spread + i, square_root(where_less(variance, none, none, variance)));
        }
        const double factor =
            softmax(spread, lag, [&](std::int64_t i) { return load<Doubles>(spread + i); });
        for (std::int64_t i = 0; i < lag; ++i) spread[i] *= factor;
    }
}

/// Replaces numbers by their rank from below, as a share of all; of equals the first is the
/// highest. There is room up to a multiple of eight.
void rank(double* values, std::int64_t count, double* ranks) {
    fill(values + count, padded(count) - count, kInfinity);
    for (std::int64_t i = 0; i < count; ++i) {
        const std::int64_t own = i / 8 * 8;
        const double value = values[i];
        Counts below;
        for (std::int64_t j = 0; j < own; j += 8) below.add_less(load<Doubles>(values + j), value);
        below.add_less(load<Doubles>(values + own), value);
        below.add_equal_behind(load<Doubles>(values + own), value, i % 8);
        for (std::int64_t j = own + 8; j < count; j += 8) {
            below.add_up_to(load<Doubles>(values + j), value);
        }
        ranks[i] = below.sum();
    }
    for (std::int64_t i = 0; i < count; ++i) values[i] = ranks[i] / static_cast<double>(count);
}

void knorm(Element element, const ScoredRows& keys, std::int64_t begin, std::int64_t end,
           Reduce reduce, double* out) {
    switch (element) {
        case Element::kBFloat16:
            return knorm_rows<BFloat16>(keys, begin, end, reduce, out);
        case Element::kFloat16:
            return knorm_rows<Float16>(keys, begin, end, reduce, out);
        case Element::kFloat32:
            return knorm_rows<Float32>(keys, begin, end, reduce, out);
    }
}

void keydiff(Element element, const ScoredRows& keys, Reduce reduce, std::byte* scratch,
             double* out) {
    switch (element) {
        case Element::kBFloat16:
            return keydiff_rows<BFloat16>(keys, reduce, scratch, out);
        case Element::kFloat16:
            return keydiff_rows<Float16>(keys, reduce, scratch, out);
        case Element::kFloat32:
            return keydiff_rows<Float32>(keys, reduce, scratch, out);
    }
}

void lag_spread(Element element, const ScoredRows& rows, std::int64_t begin, std::int64_t lag,
                std::byte* scratch, double* out) {
    switch (element) {
        case Element::kBFloat16:
            return lag_spread_rows<BFloat16>(rows, begin, lag, scratch, out);
        case Element::kFloat16:
            return lag_spread_rows<Float16>(rows, begin, lag, scratch, out);
        case Element::kFloat32:
            return lag_spread_rows<Float32>(rows, begin, lag, scratch, out);
    }
}

}  // namespace
}  // namespace lmcache_fast
