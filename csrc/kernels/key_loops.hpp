// What keys alone tell of tokens, written once for all instruction sets.
// In an unnamed namespace: each kernel file compiles its own copy with its own flags.
#pragma once

#include "row_blocks.hpp"

namespace lmcache_fast {
namespace {

/// The heads of sixteen tokens, one after the other.
class HeadReduction {
  public:
    explicit HeadReduction(Reduce reduce) : max_(reduce == Reduce::kMax) {}

    void add(const Floats& scores) {
        const Doubles wide = widen(scores);
        if (count_++ == 0) {
            value_ = wide;
        } else if (!max_) {
            value_ = value_ + wide;
        } else {  // what is not a number stays
            value_ = Doubles::each([&](int i) {
                const DoublePart& a = wide.parts[i];
                const DoublePart& b = value_.parts[i];
                return ((a > b) | (a != a)) != 0 ? a : b;
            });
        }
    }
    /// Writes the first `count`, or all.
    void store(double* out, std::int64_t count) const {
        const bool divides = !max_ && count_ > 1;
        const Doubles result =
            divides ? value_ / all<Doubles>(static_cast<double>(count_)) : value_;
        if (count >= kLanes) return lmcache_fast::store(out, result);
        double lanes[kLanes];
        lmcache_fast::store(lanes, result);
        for (std::int64_t i = 0; i < count; ++i) out[i] = lanes[i];
    }

  private:
    bool max_;
    std::int64_t count_ = 0;
    Doubles value_{};
};

/// The lengths of sixteen heads, while the next ones are fetched.
template <typename Type>
[[gnu::always_inline]] inline Floats norms_of(const HeadBlock& block, std::int64_t head_dim,
                                              Fetcher& fetcher) {
    Floats sums[kLanes];
    for (int row = 0; row < kLanes; row += kTogether) {
        fetcher.fetch();
        Floats squares[kTogether];
        repeat<kTogether>([&](auto j) { squares[j] = Floats{}; });
        for_each16<Type>(head_dim, [&](std::int64_t, const auto& load) {
            repeat<kTogether>([&](auto j) {
                const Floats x = load(block.heads[row + j]);
                squares[j] = fused(x, x, squares[j]);
            });
        });
        repeat<kTogether>([&](auto j) { sums[row + j] = squares[j]; });
    }
    return square_root(totals(sums));
}

template <typename Type>
[[gnu::flatten]] void knorm_rows(const ScoredRows& keys, std::int64_t begin, std::int64_t end,
                                 Reduce reduce, double* out) {
    Fetcher fetcher(keys, keys.head_dim * Type::kBytes, begin, end, 0, keys.num_heads);
    for (RowBlocks blocks(keys, begin, end); !blocks.done(); blocks.next()) {
        HeadReduction heads(reduce);
        for (std::int64_t head = 0; head < keys.num_heads; ++head) {
            heads.add(Floats{} - norms_of<Type>(blocks.head(head), keys.head_dim, fetcher));
        }
        heads.store(out + blocks.first() - begin, blocks.count());
    }
}

template <typename Type>
[[gnu::flatten]] void keydiff_rows(const ScoredRows& keys, Reduce reduce, std::byte* scratch,
                                   double* out) {
    const std::int64_t dim = padded(keys.head_dim);
    const std::int64_t tokens = keys.num_tokens;
    double* const sums = reinterpret_cast<double*>(scratch);  // [heads, dim] of directions
    float* const anchors = reinterpret_cast<float*>(sums + keys.num_heads * dim);
    float* const lengths = anchors + keys.num_heads * dim;  // [heads] of the anchors
    float* const norms = lengths + keys.num_heads;          // [blocks, heads, 16]
    std::byte* const zeros = reinterpret_cast<std::byte*>(norms + padded(tokens) * keys.num_heads);
    fill(sums, keys.num_heads * dim, 0.0);
    fill(zeros, dim * Type::kBytes, std::byte{0});
    float* own_norms = norms;
    const Fetcher all_rows(keys, keys.head_dim * Type::kBytes, 0, tokens, 0, keys.num_heads);
    Fetcher fetcher = all_rows;
    for (RowBlocks blocks(keys, 0, tokens); !blocks.done(); blocks.next()) {
        for (std::int64_t head = 0; head < keys.num_heads; ++head, own_norms += kLanes) {
            HeadBlock block = blocks.head(head);
            const Floats norm = norms_of<Type>(block, keys.head_dim, fetcher);
            store(own_norms, norm);
            float inverse[kLanes];
            store(inverse, all<Floats>(1) / norm);
            for (std::int64_t row = 0; row < kLanes; ++row) {
                // What has no direction gives none: zeros, and keys that are not finite.
                if (row < blocks.count() && own_norms[row] <= kMost && inverse[row] <= kMost) {
                    continue;
                }
                block.heads[row] = zeros;
                inverse[row] = 0;
            }
            for_each16<Type>(keys.head_dim, [&](std::int64_t i, const auto& load) {
                Floats sum{};
                for (int row = 0; row < kLanes; ++row) {
                    sum = fused(load(block.heads[row]), all<Floats>(inverse[row]), sum);
                }
                double* const to = sums + head * dim + i;
                store(to, lmcache_fast::load<Doubles>(to) + widen(sum));
            });
        }
    }
    for (std::int64_t head = 0; head < keys.num_heads; ++head) {
        Doubles squares{};
        for (std::int64_t i = head * dim; i < (head + 1) * dim; i += kLanes) {
            const Doubles mean =
                load<Doubles>(sums + i) / all<Doubles>(static_cast<double>(tokens));
            store(sums + i, mean);
            squares = squares + mean * mean;
            for (std::int64_t j = i; j < i + kLanes; ++j) anchors[j] = static_cast<float>(sums[j]);
        }
        lengths[head] = static_cast<float>(square_root(total(squares)));
    }
    const Floats least = all<Floats>(1e-8F);
    own_norms = norms;
    fetcher = all_rows;
    for (RowBlocks blocks(keys, 0, tokens); !blocks.done(); blocks.next()) {
        HeadReduction heads(reduce);
        for (std::int64_t head = 0; head < keys.num_heads; ++head, own_norms += kLanes) {
            const HeadBlock block = blocks.head(head);
            Floats products[kLanes];
            for (int row = 0; row < kLanes; row += kTogether) {
                fetcher.fetch();
                Floats sum[kTogether];
                repeat<kTogether>([&](auto j) { sum[j] = Floats{}; });
                for_each16<Type>(keys.head_dim, [&](std::int64_t i, const auto& load) {
                    const Floats anchor = lmcache_fast::load<Floats>(anchors + head * dim + i);
                    repeat<kTogether>([&](auto j) {
                        sum[j] = fused(load(block.heads[row + j]), anchor, sum[j]);
                    });
                });
                repeat<kTogether>([&](auto j) { products[row + j] = sum[j]; });
            }
            const Floats both =
                higher(load<Floats>(own_norms), least) * higher(all<Floats>(lengths[head]), least);
            heads.add(Floats{} - totals(products) / both);
        }
        heads.store(out + blocks.first(), blocks.count());
    }
}

void knorm(Element element, const ScoredRows& keys, std::int64_t begin, std::int64_t end,
           Reduce reduce, double* out) {
    with_type(element,
              [&](auto type) { knorm_rows<decltype(type)>(keys, begin, end, reduce, out); });
}

void keydiff(Element element, const ScoredRows& keys, Reduce reduce, std::byte* scratch,
             double* out) {
    with_type(element,
              [&](auto type) { keydiff_rows<decltype(type)>(keys, reduce, scratch, out); });
}

}  // namespace
}  // namespace lmcache_fast
