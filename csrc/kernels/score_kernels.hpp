// Token scores, one plane of one layer at a time. Like kernels.hpp this includes nothing that
// another file could share inline code with.
//
// Every sum has a defined order, so that all instruction sets and the reference in torch give the
// same bits: element i goes into partial sum i % 8, in ascending order; then the eight become four,
// two and one by adding the upper half to the lower. Partial sums over a head's elements and over
// keys are float32, all others float64. No multiplication and addition is fused.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../head_shape.hpp"

namespace lmcache_fast {

/// The rows of one plane of one layer, and the heads in a row.
struct ScoredRows {
    const std::byte* const* bases;  // of each chunk
    std::int64_t tokens_per_chunk;
    std::int64_t token_stride;  // bytes
    std::int64_t num_tokens;
    std::int64_t num_heads;
    std::int64_t head_dim;
    const std::int64_t* head_offsets;  // bytes from a row's beginning to each head
    std::int64_t offset;               // bytes from a chunk's base to its first row
};

/// How the heads' scores of a token become one.
enum class Reduce { kMean, kMax };

/// Queries float32 [num_heads, group * window, padded], the group's heads behind one another.
struct Queries {
    const float* values;
    std::int64_t group;
    std::int64_t window;
    std::int64_t kernel_size;
};

/// Elements of a head, padded with zeros to whole partial sums.
constexpr std::int64_t padded(std::int64_t head_dim) {
    return (head_dim + 7) / 8 * 8;
}

/// Queries whose attention is computed together.
constexpr std::int64_t kQueryTile = 16;

// Bytes of scratch memory that the scorers of these names need, aligned to 64.
constexpr std::int64_t keydiff_scratch(std::int64_t tokens, std::int64_t heads,
                                       std::int64_t head_dim) {
    return heads * (8 * tokens + 8 + 32 * padded(head_dim));
}
constexpr std::int64_t lag_spread_scratch(std::int64_t lag, std::int64_t heads,
                                          std::int64_t head_dim) {
    return 8 * heads * (padded(lag) + padded(head_dim));
}
constexpr std::int64_t attention_scratch(std::int64_t tokens, std::int64_t heads,
                                         std::int64_t head_dim) {
    return padded(tokens) * (8 + heads * (8 + 4 * kQueryTile)) + 32 * heads * padded(head_dim);
}

struct ScoreKernels {
    const char* name;

    /// Writes the scores of tokens [begin, end) to `out`.
    void (*knorm)(Element element, const ScoredRows& keys, std::int64_t begin, std::int64_t end,
                  Reduce reduce, double* out);
    /// Writes the scores of all tokens to `out`.
    void (*keydiff)(Element element, const ScoredRows& keys, Reduce reduce, std::byte* scratch,
                    double* out);
    /// Writes [num_heads, padded(lag)]: for the tokens from `begin` on their spread against the
    /// `lag` tokens behind them.
    void (*lag_spread)(Element element, const ScoredRows& rows, std::int64_t begin,
                       std::int64_t lag, std::byte* scratch, double* out);
    /// Replaces scores by their rank from below, as a share of all; of equals the first is the
    /// highest. Both have room for padded(count).
    void (*rank)(double* scores, std::int64_t count, double* ranks);
    /// Writes the attention to all tokens but those of the window to `out`.
    void (*attention)(Element element, const ScoredRows& keys, const Queries& queries,
                      Reduce reduce, std::byte* scratch, double* out);
};

extern const ScoreKernels kPortableScores;
extern const ScoreKernels kAvx2Scores;
extern const ScoreKernels kAvx512Scores;

}  // namespace lmcache_fast
