// Attention of the last tokens to those before them, written once for all instruction sets.
// In an unnamed namespace: each kernel file compiles its own copy with its own flags.
#pragma once

#include "key_loops.hpp"
#include "softmax.hpp"

namespace lmcache_fast {
namespace {

/// Products of sixteen keys and so many queries, `dim` floats each, to `to`, `stride` apart. Calls
/// fetch() for every kTogether keys.
template <typename Type, int kQueries, typename Fetch>
[[gnu::flatten]] void multiply_block(const HeadBlock& keys, std::int64_t head_dim,
                                     const float* queries, std::int64_t dim, float* to,
                                     std::int64_t stride, const Fetch& fetch) {
    constexpr int kKeys = kLanes / kQueries;
    constexpr int kKeysAtOnce = 4 * kTogether / kQueries < kKeys ? 4 * kTogether / kQueries : kKeys;
    const float* query_elements[kQueries];
    repeat<kQueries>([&](auto i) { query_elements[i] = queries + i * dim; });
    for (int first = 0; first < kLanes; first += kKeys) {
        for (int i = 0; i < kKeys; i += kTogether) fetch();
        Floats all_sums[kLanes];
        repeat<kKeys / kKeysAtOnce>([&](auto part) {
            constexpr int kFirst = part * kKeysAtOnce;
            Floats sums[kQueries * kKeysAtOnce];
            repeat<kQueries * kKeysAtOnce>([&](auto i) { sums[i] = Floats{}; });
            for_each16<Type>(head_dim, [&](std::int64_t i, const auto& load) {
                Floats key[kKeysAtOnce];
                repeat<kKeysAtOnce>([&](auto j) { key[j] = load(keys.heads[first + kFirst + j]); });
                repeat<kQueries>([&](auto query) {
                    const Floats q = lmcache_fast::load<Floats>(query_elements[query] + i);
                    repeat<kKeysAtOnce>([&](auto j) {
                        Floats& sum = sums[query * kKeysAtOnce + j];
                        sum = fused(q, key[j], sum);
                    });
                });
            });
            repeat<kQueries>([&](auto query) {
                repeat<kKeysAtOnce>([&](auto j) {
                    all_sums[query * kKeys + kFirst + j] = sums[query * kKeysAtOnce + j];
                });
            });
        });
        alignas(64) float products[kLanes];
        store(products, totals(all_sums));
        for (int query = 0; query < kQueries; ++query) {
            std::memcpy(to + query * stride + first, products + query * kKeys,
                        kKeys * sizeof(float));
        }
    }
}

/// Products of the keys of heads [first, first + num_heads) and `count` queries of each, `apart`
/// floats from head to head, to logits[(head * count + query) * padded(tokens) + token].
template <typename Type>
void multiply(const ScoredRows& keys, std::int64_t first, std::int64_t num_heads,
              const float* queries, std::int64_t apart, std::int64_t count, float* converted,
              float* logits) {
    const std::int64_t dim = padded(keys.head_dim);
    const std::int64_t stride = padded(keys.num_tokens);
    Fetcher fetcher(keys, keys.head_dim * Type::kBytes, 0, keys.num_tokens, first,
                    first + num_heads);
    const auto fetch = [&] { fetcher.fetch(); };
    const auto fetched = [] {};
    for (RowBlocks blocks(keys, 0, keys.num_tokens); !blocks.done(); blocks.next()) {
        for (std::int64_t head = 0; head < num_heads; ++head) {
            HeadBlock block = blocks.head(first + head);
            const float* const own = queries + (first + head) * apart;
            float* const to = logits + head * count * stride + blocks.first();
            if (count == 4) {
                multiply_block<Type, 4>(block, keys.head_dim, own, dim, to, stride, fetch);
                continue;
            }
            if (count == 1) {
                multiply_block<Type, 1>(block, keys.head_dim, own, dim, to, stride, fetch);
                continue;
            }
            for (int row = 0; row < kLanes; ++row) {  // once for all of them
                if (row % kTogether == 0) fetch();
                float* const floats = converted + row * dim;
                for_each16<Type>(keys.head_dim, [&](std::int64_t i, const auto& load) {
                    store(floats + i, load(block.heads[row]));
                });
                block.heads[row] = reinterpret_cast<const std::byte*>(floats);
            }
            std::int64_t i = 0;
            for (; i + 4 <= count; i += 4) {
                multiply_block<Float32, 4>(block, dim, own + i * dim, dim, to + i * stride, stride,
                                           fetched);
            }
            for (; i < count; ++i) {
                multiply_block<Float32, 1>(block, dim, own + i * dim, dim, to + i * stride, stride,
                                           fetched);
            }
        }
    }
}

/// Adds the attention of one query, which sees `seen` tokens, to `sums` of the first `scored`.
void add_attention(float* logits, float scale, std::int64_t seen, std::int64_t scored,
                   float* sums) {
    const Floats factor = all<Floats>(softmax(logits, seen, scale));
    for (std::int64_t i = 0; i < scored; i += kLanes) {
        store(sums + i, fused(load<Floats>(logits + i), factor, load<Floats>(sums + i)));
    }
}

template <typename Type>
void attention_rows(const ScoredRows& keys, const Queries& queries, Reduce reduce,
                    std::byte* scratch, double* out) {
    const std::int64_t dim = padded(keys.head_dim);
    const std::int64_t room = padded(keys.num_tokens);
    const std::int64_t scored = keys.num_tokens - queries.window;
    const std::int64_t all_queries = queries.count();
    const std::int64_t tile = queries.tile();
    const std::int64_t heads_at_once = queries.heads_at_once(keys.num_heads);
    const std::int64_t reach = queries.reach(scored);
    const std::int64_t apart = reach + room + reach;
    float* const converted = reinterpret_cast<float*>(scratch);
    float* const logits = converted + kLanes * dim;            // [heads at once, tile, room]
    float* const sums = logits + heads_at_once * tile * room;  // [heads, apart]
    const auto scale = static_cast<float>(1.0 / square_root(static_cast<double>(keys.head_dim)));
    fill(converted, kLanes * dim, 0.0F);
    fill(sums, keys.num_heads * apart, 0.0F);
    for (std::int64_t first = 0; first < keys.num_heads; first += heads_at_once) {
        for (std::int64_t begin = 0; begin < all_queries; begin += tile) {
            const std::int64_t count = all_queries - begin < tile ? all_queries - begin : tile;
            multiply<Type>(keys, first, heads_at_once, queries.values + begin * dim,
                           all_queries * dim, count, converted, logits);
            for (std::int64_t head = 0; head < heads_at_once; ++head) {
                for (std::int64_t query = 0; query < count; ++query) {
                    add_attention(logits + (head * count + query) * room, scale,
                                  scored + (begin + query) % queries.window + 1, scored,
                                  sums + (first + head) * apart + reach);
                }
            }
        }
    }
    const Floats divisor = all<Floats>(static_cast<float>(all_queries * queries.kernel_size));
    for (std::int64_t head = 0; head < keys.num_heads; ++head) {
        fill(sums + head * apart + reach + scored, room - scored + reach, 0.0F);
    }
    for (std::int64_t i = 0; i < scored; i += kLanes) {
        HeadReduction heads(reduce);
        for (std::int64_t head = 0; head < keys.num_heads; ++head) {
            const float* const from = sums + head * apart + i;
            Floats sum = load<Floats>(from);
            for (std::int64_t j = 1; j <= 2 * reach; ++j) {
                sum = sum + load<Floats>(from + j);
            }
            heads.add(sum / divisor);
        }
        heads.store(out + i, scored - i);
    }
}

void attention(Element element, const ScoredRows& keys, const Queries& queries, Reduce reduce,
               std::byte* scratch, double* out) {
    with_type(element, [&](auto type) {
        attention_rows<decltype(type)>(keys, queries, reduce, scratch, out);
    });
}

}  // namespace
}  // namespace lmcache_fast
