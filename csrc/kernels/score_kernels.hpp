// Token scores, one plane of one layer at a time. Like kernels.hpp this includes nothing that
// another file could share inline code with.
//
// Every sum has a defined order, so that all instruction sets and the reference in torch give the
// same bits. Over a head's elements: element i goes into partial sum i % 16, in ascending order,
// products with one rounding (fused); then the sixteen become eight, four, two and one by adding
// the upper half to the lower. These and what is computed of them is float32; sums over keys and
// over heads are float64.
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

/// Up to whole vectors of sixteen: elements of a head and tokens, with zeros behind them.
constexpr std::int64_t padded(std::int64_t count) {
    return (count + 15) / 16 * 16;
}

/// Queries float32 [num_heads, group * window, padded], the group's heads behind one another.
struct Queries {
    const float* values;
    std::int64_t group;
    std::int64_t window;
    std::int64_t kernel_size;

    constexpr std::int64_t count() const { return group * window; }
    /// Neighbours on either side whose attention of `scored` tokens is averaged.
    constexpr std::int64_t reach(std::int64_t scored) const {
        return kernel_size / 2 < scored ? kernel_size / 2 : scored;
    }
    /// So many are computed together.
    constexpr std::int64_t tile() const { return count() < 64 ? count() : 64; }
    /// For so many heads: few queries meet all heads of a row while it is there.
    constexpr std::int64_t heads_at_once(std::int64_t num_heads) const {
        return count() <= 8 ? num_heads : 1;
    }
};

/// Behind `num_sink` tokens `partitions` of `lag` tokens each, and one more, which is not scored.
struct LagPartitions {
    std::int64_t num_sink;
    std::int64_t lag;
    std::int64_t partitions;
    bool cross_scoring;
};

// Bytes of scratch memory that the scorers of these names need, aligned to 64.
constexpr std::int64_t keydiff_scratch(std::int64_t tokens, std::int64_t heads,
                                       std::int64_t head_dim) {
    return heads * (12 * padded(head_dim) + 4 + 4 * padded(tokens)) + 4 * padded(head_dim);
}
/// Of one plane for lagkv: two sums of sixteen rows a head, and two ranges.
constexpr std::int64_t spread_scratch(std::int64_t heads, std::int64_t head_dim) {
    return 4 * heads * (2 * 16 * 16 + 4 * padded(head_dim));
}
constexpr std::int64_t lagkv_scratch(const LagPartitions& how, std::int64_t heads,
                                     std::int64_t head_dim) {
    return spread_scratch(heads, head_dim) + 4 * heads * (2 * how.partitions + 1) * padded(how.lag);
}
constexpr std::int64_t attention_scratch(const Queries& queries, std::int64_t tokens,
                                         std::int64_t heads, std::int64_t head_dim) {
    return 4 *
           (16 * padded(head_dim) + queries.heads_at_once(heads) * queries.tile() * padded(tokens) +
            heads * (padded(tokens) + 2 * queries.reach(tokens - queries.window)));
}

struct ScoreKernels {
    const char* name;

    /// Writes the scores of tokens [begin, end) to `out`.
    void (*knorm)(Element element, const ScoredRows& keys, std::int64_t begin, std::int64_t end,
                  Reduce reduce, double* out);
    /// Writes the scores of all tokens to `out`.
    void (*keydiff)(Element element, const ScoredRows& keys, Reduce reduce, std::byte* scratch,
                    double* out);
    /// Writes the scores of the partitions' tokens to `out`, which begins with token 0.
    void (*lagkv)(Element element, const ScoredRows& keys, const ScoredRows& values,
                  const LagPartitions& how, Reduce reduce, std::byte* scratch, double* out);
    /// Writes the attention to all tokens but those of the window to `out`.
    void (*attention)(Element element, const ScoredRows& keys, const Queries& queries,
                      Reduce reduce, std::byte* scratch, double* out);
};

extern const ScoreKernels kPortableScores;
extern const ScoreKernels kAvx2Scores;
extern const ScoreKernels kAvx512Scores;

}  // namespace lmcache_fast
