// Attention of the last tokens to those before them, written once for all instruction sets.
// In an unnamed namespace: each kernel file compiles its own copy with its own flags.
#pragma once

#include "score_loops.hpp"

namespace lmcache_fast {
namespace {

/// Products of the rows' keys and up to eight queries a head, `apart` floats from head to head, to
/// logits[(head * tile + query) * stride + token]. Two rows meet four queries at a time.
template <typename Type>
void multiply_few(const ScoredRows& keys, const float* queries, std::int64_t apart,
                  std::int64_t count, std::int64_t tile, float* packed, float* logits,
                  std::int64_t stride) {
    const std::int64_t dim = padded(keys.head_dim);
    constexpr std::int64_t kFour = 4;
    const std::int64_t fours = (count + kFour - 1) / kFour;
    // As they are needed: eight elements of each query after the other.
    for (std::int64_t head = 0; head < keys.num_heads; ++head) {
        for (std::int64_t query = 0; query < fours * kFour; ++query) {
            float* const own = packed + (head * fours + query / kFour) * kFour * dim;
            for (std::int64_t i = 0; i < dim; ++i) {
                own[i / 8 * 8 * kFour + query % kFour * 8 + i % 8] =
                    query < count ? queries[head * apart + query * dim + i] : 0;
            }
        }
    }
    Cursor at(keys, 0);
    for (std::int64_t token = 0; token < keys.num_tokens; token += 2) {
        const std::byte* const first = at.row();
        const bool two = token + 1 < keys.num_tokens;
        if (two) at.next();
        const std::byte* const second = at.row();
        for (std::int64_t head = 0; head < keys.num_heads; ++head) {
            const std::int64_t offset = keys.head_offsets[head];
            for (std::int64_t j = kRowsAhead - 1; j <= kRowsAhead; ++j) {
                at.prefetch(head, keys.head_dim * Type::kBytes, j);
            }
            for (std::int64_t four = 0; four < fours; ++four) {
                const float* const own = packed + (head * fours + four) * kFour * dim;
                TwiceEight sums[kFour];
                for (TwiceEight& sum : sums) sum = TwiceEight::of(all<Floats>(0), all<Floats>(0));
                for_each8<Type>(first + offset, second + offset, keys.head_dim,
                                [&](const TwiceEight& x, std::int64_t i) {
                                    for (std::int64_t j = 0; j < kFour; ++j) {
                                        sums[j] =
                                            sums[j] + TwiceEight::same(own + i * kFour + j * 8) * x;
                                    }
                                });
                float products[2 * kFour];
                totals(sums, products);
                float* const to = logits + (head * tile + four * kFour) * stride + token;
                for (std::int64_t j = 0; j < kFour && four * kFour + j < count; ++j) {
                    std::memcpy(to + j * stride, products + 2 * j, 2 * sizeof(float));
                }
            }
        }
        at.next();
    }
}

/// The same for more queries: eight keys are made floats, and the queries go over them in pairs.
template <typename Type>
void multiply_many(const ScoredRows& keys, const float* queries, std::int64_t apart,
                   std::int64_t count, std::int64_t tile, float* packed, float* logits,
                   std::int64_t stride) {
    const std::int64_t dim = padded(keys.head_dim);
    constexpr int kKeys = 4;  // at once: with two queries, as many sums as there are registers for
    Cursor at(keys, 0);
    fill(packed, 8 * dim, 0.0F);
    for (std::int64_t token = 0; token < keys.num_tokens; token += 8) {
        const std::int64_t left = keys.num_tokens - token < 8 ? keys.num_tokens - token : 8;
        for (std::int64_t head = 0; head < keys.num_heads; ++head) {
            Cursor key = at;
            for (std::int64_t j = 0; j < left; ++j, key.next()) {
                for_each8<Type>(key.head(head), keys.head_dim, [&](Floats x, std::int64_t i) {
                    store(packed + 8 * i + 8 * j, x);
                });
            }
            for (std::int64_t query = 0; query < count; query += 2) {
                const std::int64_t other = query + 1 < count ? query + 1 : query;
                const float* const first = queries + head * apart + query * dim;
                const float* const second = queries + head * apart + other * dim;
                float* const to = logits + (head * tile + query) * stride + token;
                float* const to_second = logits + (head * tile + other) * stride + token;
                for (int from = 0; from < 8; from += kKeys) {
                    Floats sums[2 * kKeys];
                    for (Floats& sum : sums) sum = all<Floats>(0);
                    for (std::int64_t i = 0; i < dim; i += 8) {
                        const Floats a = load<Floats>(first + i);
                        const Floats b = load<Floats>(second + i);
                        for (int j = 0; j < kKeys; ++j) {
                            const Floats x = load<Floats>(packed + 8 * i + 8 * (from + j));
                            sums[j] = sums[j] + a * x;
                            sums[kKeys + j] = sums[kKeys + j] + b * x;
                        }
                    }
                    for (int j = 0; j < kKeys; ++j) {
                        to[from + j] = total(sums[j]);
                        to_second[from + j] = total(sums[kKeys + j]);
                    }
                }
            }
        }
        for (std::int64_t j = 0; j < left; ++j) at.next();
    }
}

/// Adds the attention of one query, which sees `seen` tokens, to `sums` of the first `scored`.
void add_attention(const float* logits, double scale, std::int64_t seen, std::int64_t scored,
                   double* weights, double* sums) {
    const double factor = softmax(
        weights, seen, [&](std::int64_t i) { return widen(load<Floats>(logits + i)) * scale; });
    for (std::int64_t i = 0; i < scored; i += 8) {
        store(sums + i, load<Doubles>(sums + i) + load<Doubles>(weights + i) * factor);
    }
}

template <typename Type>
void attention_rows(const ScoredRows& keys, const Queries& queries, Reduce reduce,
                    std::byte* scratch, double* out) {
    const std::int64_t dim = padded(keys.head_dim);
    const std::int64_t tokens = keys.num_tokens;
    const std::int64_t room = padded(tokens);
    const std::int64_t scored = tokens - queries.window;
    const std::int64_t all_queries = queries.group * queries.window;
    const std::int64_t tile = all_queries < kQueryTile ? all_queries : kQueryTile;
    double* const weights = reinterpret_cast<double*>(scratch);
    double* const sums = weights + room;  // [heads, room]
    float* const logits =
        reinterpret_cast<float*>(sums + keys.num_heads * room);  // [heads, tile, .]
    float* const converted = logits + keys.num_heads * tile * room;
    const double scale = 1.0 / square_root(static_cast<double>(keys.head_dim));
    fill(sums, keys.num_heads * room, 0.0);
    for (std::int64_t first = 0; first < all_queries; first += tile) {
        const std::int64_t count = all_queries - first < tile ? all_queries - first : tile;
        const float* const of_tile = queries.values + first * dim;
        if (count <= 8) {
            multiply_few<Type>(keys, of_tile, all_queries * dim, count, tile, converted, logits,
                               room);
        } else {
            multiply_many<Type>(keys, of_tile, all_queries * dim, count, tile, converted, logits,
                                room);
        }
        for (std::int64_t head = 0; head < keys.num_heads; ++head) {
            for (std::int64_t query = 0; query < count; ++query) {
                add_attention(logits + (head * tile + query) * room, scale,
                              scored + (first + query) % queries.window + 1, scored, weights,
                              sums + head * room);
            }
        }
    }
    const std::int64_t reach = queries.kernel_size / 2;
    const auto divisor = static_cast<double>(all_queries * queries.kernel_size);
    for (std::int64_t i = 0; i < scored; ++i) {
        const std::int64_t begin = i > reach ? i - reach : 0;
        const std::int64_t end = i + reach + 1 < scored ? i + reach + 1 : scored;
        HeadReduction heads(reduce);
        for (std::int64_t head = 0; head < keys.num_heads; ++head) {
            double sum = 0;
            for (std::int64_t j = begin; j < end; ++j) sum += sums[head * room + j];
            heads.add(sum / divisor);
        }
        out[i] = heads.value();
    }
}

void attention(Element element, const ScoredRows& keys, const Queries& queries, Reduce reduce,
               std::byte* scratch, double* out) {
    switch (element) {
        case Element::kBFloat16:
            return attention_rows<BFloat16>(keys, queries, reduce, scratch, out);
        case Element::kFloat16:
            return attention_rows<Float16>(keys, queries, reduce, scratch, out);
        case Element::kFloat32:
            return attention_rows<Float32>(keys, queries, reduce, scratch, out);
    }
}

}  // namespace
}  // namespace lmcache_fast
