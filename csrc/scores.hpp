// How much each token of a cache is worth, read from the chunks where they are.
#pragma once

#include <cstdint>

#include "chunked_side.hpp"
#include "kernels/score_kernels.hpp"

namespace lmcache_fast {

/// What all scorers are told. Rows are heads of `head_dim` elements.
struct Scoring {
    const ChunkedSide& side;
    Element element;
    std::int64_t head_dim;
    Reduce reduce;
    unsigned num_threads;  // 0: default_num_threads
};

/// Heads in a row of the side. Throws std::invalid_argument where rows are no whole heads.
std::int64_t num_heads(const Scoring& scoring);

// Each writes scores [layers, tokens], of a layer's heads reduced to one; higher means more worth.
// They throw std::invalid_argument before they read, and std::system_error if memory went away.

/// Minus the length of the keys.
void knorm_scores(const Scoring& scoring, double* out);

/// Minus the cosine between a key and the mean direction of all keys.
void keydiff_scores(const Scoring& scoring, double* out);

/// Behind `num_sink` tokens come partitions of `lag` tokens. A token's score is its rank, by its
/// spread against the next partition, among those of its own: 0 to below 1; with `cross_scoring`
/// the spread itself. Tokens without a next partition are not written.
void lagkv_scores(const Scoring& scoring, std::int64_t num_sink, std::int64_t lag,
                  bool cross_scoring, double* out);

/// Attention of the last `window` tokens, `queries` float32 [layers, query heads, window,
/// head_dim], to the tokens before them, smoothed over `kernel_size` tokens, the mean over the
/// window and the query heads of a head of keys. The window's own tokens are not written.
void attention_scores(const Scoring& scoring, const float* queries, std::int64_t query_heads,
                      std::int64_t window, std::int64_t kernel_size, double* out);

}  // namespace lmcache_fast
