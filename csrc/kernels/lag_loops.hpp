// How much tokens vary against those behind them, written once for all instruction sets.
// In an unnamed namespace: each kernel file compiles its own copy with its own flags.
#pragma once

#include "key_loops.hpp"
#include "softmax.hpp"

namespace lmcache_fast {
namespace {

/// Of each channel of a partition the lowest value, and in the end 1 over the range.
struct Range {
    float* low;
    float* inverse;  // the highest value until then
};

/// The same head of a few rows.
struct Heads {
    const std::byte* rows[kTogether];

    Heads(const RowBlocks& blocks, int first, std::int64_t offset) {
        repeat<kTogether>([&](auto i) { rows[i] = blocks.row(first + i) + offset; });
    }
};

template <typename Type>
[[gnu::always_inline]] inline void add_to_range(const Heads& heads, std::int64_t head_dim,
                                                const Range& range) {
    for_each16<Type>(head_dim, [&](std::int64_t i, const auto& load) {
        Floats low = lmcache_fast::load<Floats>(range.low + i);
        Floats high = lmcache_fast::load<Floats>(range.inverse + i);
        repeat<kTogether>([&](auto j) {
            const Floats x = load(heads.rows[j]);
            low = lower(x, low);
            high = higher(x, high);
        });
        store(range.low + i, low);
        store(range.inverse + i, high);
    });
}

void finish_range(const Range& range, std::int64_t channels) {
    for (std::int64_t i = 0; i < channels; ++i) {
        const float width = range.inverse[i] - range.low[i];
        const float one = 1.0F / width;
        // A channel that does not vary, or more than numbers can, says nothing.
        const bool good = (width > 0) & (width <= kMost) & (one <= kMost);
        range.inverse[i] = good ? one : 0.0F;
        range.low[i] = good ? range.low[i] : 0.0F;
    }
}

/// Of elements, scaled to the range, the partial sums and those of the squares; of sixteen rows.
struct Moments {
    Floats sums[kLanes];
    Floats squares[kLanes];
};

template <typename Type>
[[gnu::always_inline]] inline void add_to_moments(const Heads& heads, std::int64_t head_dim,
                                                  const Range& range, int first, Moments& moments) {
    Floats sums[kTogether];
    Floats squares[kTogether];
    repeat<kTogether>([&](auto j) { sums[j] = squares[j] = Floats{}; });
    for_each16<Type>(head_dim, [&](std::int64_t i, const auto& load) {
        const Floats low = lmcache_fast::load<Floats>(range.low + i);
        const Floats inverse = lmcache_fast::load<Floats>(range.inverse + i);
        repeat<kTogether>([&](auto j) {
            const Floats z = (load(heads.rows[j]) - low) * inverse;
            sums[j] = sums[j] + z;
            squares[j] = fused(z, z, squares[j]);
        });
    });
    repeat<kTogether>([&](auto j) {
        moments.sums[first + j] = sums[j];
        moments.squares[first + j] = squares[j];
    });
}

Floats deviation(const Moments& moments, std::int64_t head_dim) {
    const auto count = static_cast<float>(head_dim);
    const Floats sum = totals(moments.sums);
    const Floats variance = (totals(moments.squares) - sum * sum / all<Floats>(count)) /
                            all<Floats>(count > 2 ? count - 1 : 1);
    return square_root(where_less(variance, Floats{}, Floats{}, variance));
}

/// Writes [partitions, heads, padded(lag)]: the spread of the tokens of each partition against the
/// partition behind it, as softmax over the partition.
template <typename Type>
[[gnu::flatten]] void spread_rows(const ScoredRows& rows, const LagPartitions& how,
                                  std::byte* scratch, float* out) {
    const std::int64_t dim = padded(rows.head_dim);
    const std::int64_t channels = rows.num_heads * dim;
    const std::int64_t room = padded(how.lag);
    Moments* const moments = reinterpret_cast<Moments*>(scratch);              // [heads]
    float* const ranges = reinterpret_cast<float*>(moments + rows.num_heads);  // [2, 2, channels]
    const auto begin_of = [&](std::int64_t partition) {
        return how.num_sink + partition * how.lag;
    };
    const auto range_of = [&](std::int64_t partition, std::int64_t head) {
        float* const low = ranges + partition % 2 * 2 * channels + head * dim;
        return Range{low, low + channels};
    };
    Fetcher fetcher(rows, rows.head_dim * Type::kBytes, begin_of(1), begin_of(how.partitions + 1),
                    0, rows.num_heads);
    // The range of one partition is found beside the spread against the one before, whose range is
    // known: together they take as long to compute as the memory to answer.
    for (std::int64_t found = 1; found <= how.partitions + 1; ++found) {
        const bool finds = found <= how.partitions;
        const bool spreads = found > 1;
        const std::int64_t later = begin_of(finds ? found : found - 1);
        const std::int64_t earlier = begin_of(spreads ? found - 2 : 0);
        float* const spread = out + (spreads ? found - 2 : 0) * rows.num_heads * room;
        fill(range_of(found, 0).low, channels, __builtin_inff());
        fill(range_of(found, 0).inverse, channels, -__builtin_inff());
        RowBlocks behind(rows, earlier, earlier + how.lag);
        for (RowBlocks ahead(rows, later, later + how.lag); !ahead.done(); ahead.next()) {
            for (int row = 0; row < kLanes; row += kTogether) {
                for (std::int64_t head = 0; head < rows.num_heads; ++head) {
                    const std::int64_t offset = rows.head_offsets[head];
                    fetcher.fetch();
                    if (finds) {
                        add_to_range<Type>(Heads(ahead, row, offset), rows.head_dim,
                                           range_of(found, head));
                    }
                    if (spreads) {
                        add_to_moments<Type>(Heads(behind, row, offset), rows.head_dim,
                                             range_of(found - 1, head), row, moments[head]);
                    }
                }
            }
            for (std::int64_t head = 0; head < rows.num_heads && spreads; ++head) {
                store(spread + head * room + behind.first() - earlier,
                      deviation(moments[head], rows.head_dim));
            }
            behind.next();
        }
        if (finds) finish_range(range_of(found, 0), channels);
        for (std::int64_t head = 0; head < rows.num_heads && spreads; ++head) {
            float* const own = spread + head * room;
            const Floats factor = all<Floats>(softmax(own, how.lag, 1));
            for (std::int64_t i = 0; i < how.lag; i += kLanes) {
                store(own + i, load<Floats>(own + i) * factor);
            }
        }
    }
}

/// Ranks numbers from below, as a share of all; of equals the first is the highest. Both have room
/// up to a multiple of sixteen, what is behind the numbers is overwritten.
void rank(float* values, std::int64_t count, float* ranks) {
    fill(values + count, padded(count) - count, __builtin_inff());  // below none
    const Floats share = all<Floats>(static_cast<float>(count));
    for (std::int64_t i = 0; i < count; i += kLanes) {
        const Floats own = load<Floats>(values + i);
        Counts below[2];  // in turns: each waits for its last
        for (std::int64_t j = 0; j < i; j += kLanes) {
            repeat<kLanes>([&](auto k) { below[k % 2].add_above(own, values[j + k]); });
        }
        repeat<kLanes>([&](auto k) { below[k % 2].add_above_in_order(own, values[i + k], k); });
        for (std::int64_t j = i + kLanes; j < count; j += kLanes) {
            repeat<kLanes>([&](auto k) { below[k % 2].add_not_below(own, values[j + k]); });
        }
        store(ranks + i, (below[0].value() + below[1].value()) / share);
    }
}

template <typename Type>
void lagkv_rows(const ScoredRows& keys, const ScoredRows& values, const LagPartitions& how,
                Reduce reduce, std::byte* scratch, double* out) {
    const std::int64_t room = padded(how.lag);
    const std::int64_t heads = keys.num_heads;
    const std::int64_t all_heads = how.partitions * heads * room;
    std::byte* const own_scratch = scratch + spread_scratch(heads, keys.head_dim);
    float* const of_keys = reinterpret_cast<float*>(own_scratch);
    float* const of_values = of_keys + all_heads;
    float* const ranks = of_values + all_heads;  // [heads, room]
    spread_rows<Type>(keys, how, scratch, of_keys);
    spread_rows<Type>(values, how, scratch, of_values);
    for (std::int64_t partition = 0; partition < how.partitions; ++partition) {
        float* const own = of_keys + partition * heads * room;
        const float* const other = of_values + partition * heads * room;
        for (std::int64_t i = 0; i < heads * room; i += kLanes) {
            const Floats sum = load<Floats>(own + i) + load<Floats>(other + i);
            store(own + i, sum * all<Floats>(0.5F));
        }
        for (std::int64_t head = 0; head < heads && !how.cross_scoring; ++head) {
            rank(own + head * room, how.lag, ranks + head * room);
        }
        const float* const scores = how.cross_scoring ? own : ranks;
        for (std::int64_t i = 0; i < how.lag; i += kLanes) {
            HeadReduction reduction(reduce);
            for (std::int64_t head = 0; head < heads; ++head) {
                reduction.add(load<Floats>(scores + head * room + i));
            }
            reduction.store(out + how.num_sink + partition * how.lag + i, how.lag - i);
        }
    }
}

void lagkv(Element element, const ScoredRows& keys, const ScoredRows& values,
           const LagPartitions& how, Reduce reduce, std::byte* scratch, double* out) {
    with_type(element, [&](auto type) {
        lagkv_rows<decltype(type)>(keys, values, how, reduce, scratch, out);
    });
}

}  // namespace
}  // namespace lmcache_fast
