// How the scorers walk over rows: sixteen at a time, a lane each.
// In an unnamed namespace: each kernel file compiles its own copy with its own flags. For the same
// reason nothing here is taken from <algorithm> or <cmath>.
#pragma once

#include "lanes.hpp"
#include "score_kernels.hpp"

namespace lmcache_fast {
namespace {

constexpr float kMost = __FLT_MAX__;
/// Rows whose sums are in registers at the same time: one alone would wait for its last sum.
#if defined(__AVX512F__)
constexpr int kTogether = 4;
#else
constexpr int kTogether = 2;
#endif

template <typename Number>
void fill(Number* begin, std::int64_t count, Number value) {
    for (std::int64_t i = 0; i < count; ++i) begin[i] = value;
}

/// Calls body with the type of the elements.
template <typename Body>
void with_type(Element element, const Body& body) {
    switch (element) {
        case Element::kBFloat16:
            return body(BFloat16{});
        case Element::kFloat16:
            return body(Float16{});
        case Element::kFloat32:
            return body(Float32{});
    }
}

/// Calls body(i, load) for every sixteen elements of heads from element i on; load(head) are those
/// of a head, and zeros behind its last one.
template <typename Type, typename Body>
[[gnu::always_inline]] inline void for_each16(std::int64_t head_dim, const Body& body) {
    std::int64_t i = 0;
    for (; i + 2 * kLanes <= head_dim; i += 2 * kLanes) {
        body(i, [&](const std::byte* head) {
            return load_half<Type, false>(head + i * Type::kBytes);
        });
        body(i + kLanes,
             [&](const std::byte* head) { return load_half<Type, true>(head + i * Type::kBytes); });
    }
    for (; i < head_dim; i += kLanes) {
        body(i, [&](const std::byte* head) {
            return load_some<Type>(head + i * Type::kBytes, head_dim - i);
        });
    }
}

/// Walks along the rows without a division for each.
class Cursor {
  public:
    Cursor(const ScoredRows& rows, std::int64_t token)
        : rows_(&rows), chunk_(token / rows.tokens_per_chunk) {
        if (token < rows.num_tokens) enter(token % rows.tokens_per_chunk);
    }
    const std::byte* row() const { return row_; }
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

/// The same head of sixteen rows.
struct HeadBlock {
    const std::byte* heads[kLanes];
};

/// Rows [begin, end) sixteen at a time. Where there are fewer, the last one stands for the others.
class RowBlocks {
  public:
    RowBlocks(const ScoredRows& rows, std::int64_t begin, std::int64_t end)
        : rows_(&rows), end_(end), first_(begin), at_(rows, begin) {
        gather();
    }
    bool done() const { return first_ >= end_; }
    std::int64_t first() const { return first_; }
    std::int64_t count() const { return end_ - first_ < kLanes ? end_ - first_ : kLanes; }

    const std::byte* row(int i) const { return current_[i]; }
    HeadBlock head(std::int64_t index) const {
        HeadBlock block;
        const std::int64_t offset = rows_->head_offsets[index];
        for (int i = 0; i < kLanes; ++i) block.heads[i] = current_[i] + offset;
        return block;
    }
    void next() {
        first_ += kLanes;
        gather();
    }

  private:
    void gather() {
        const std::int64_t rows = count();
        for (std::int64_t i = 0; i < rows; ++i, at_.next()) current_[i] = at_.row();
        for (std::int64_t i = rows; i < kLanes && i > 0; ++i) current_[i] = current_[i - 1];
    }

    const ScoredRows* rows_;
    std::int64_t end_;
    std::int64_t first_;
    Cursor at_;
    const std::byte* current_[kLanes] = {};
};

/// Fetches heads [first_head, end_head) of rows [begin, end) into the cache, in the order in which
/// they lie, `kBytesAhead` before they are read: so many take longer to arrive than the first.
class Fetcher {
  public:
    Fetcher(const ScoredRows& rows, std::int64_t head_bytes, std::int64_t begin, std::int64_t end,
            std::int64_t first_head, std::int64_t end_head)
        : rows_(&rows),
          head_bytes_(head_bytes),
          first_head_(first_head),
          end_head_(end_head),
          head_(first_head),
          row_(begin + 1 + kBytesAhead / (head_bytes * (end_head - first_head))),
          end_(end) {
        const std::int64_t all_bytes = (end_head - first_head) * head_bytes;
        const std::int64_t* const offsets = rows.head_offsets;
        without_gaps_ = rows.token_stride == all_bytes &&
                        offsets[end_head - 1] - offsets[first_head] == all_bytes - head_bytes;
    }

    /// Fetches kTogether heads: to be called for each so many that are scored, between work that
    /// does not wait for memory, since only so many lines can be under way.
    [[gnu::always_inline]] void fetch() {
        for (std::int64_t left = kTogether * head_bytes_; left > 0;) {
            if (at_ >= piece_end_ && !next_piece()) return;
            std::int64_t bytes = piece_end_ - at_;
            bytes = bytes < left ? bytes : left;
            std::int64_t i = 0;
            for (; i + 256 <= bytes; i += 256) {
                repeat<4>([&](auto j) { __builtin_prefetch(at_ + i + 64 * j); });
            }
            for (; i < bytes; i += 64) __builtin_prefetch(at_ + i);
            at_ += bytes;
            left -= bytes;
        }
    }

  private:
    [[gnu::noinline]] bool next_piece() {
        if (row_ >= end_) return false;
        const std::int64_t in_chunk = row_ % rows_->tokens_per_chunk;
        at_ = rows_->bases[row_ / rows_->tokens_per_chunk] + rows_->offset +
              in_chunk * rows_->token_stride + rows_->head_offsets[head_];
        if (without_gaps_) {
            const std::int64_t in_this = rows_->tokens_per_chunk - in_chunk;
            const std::int64_t count = in_this < end_ - row_ ? in_this : end_ - row_;
            piece_end_ = at_ + count * rows_->token_stride;
            row_ += count;
            return true;
        }
        piece_end_ = at_ + head_bytes_;
        if (++head_ == end_head_) {
            head_ = first_head_;
            ++row_;
        }
        return true;
    }

    static constexpr std::int64_t kBytesAhead = 32 << 10;

    const ScoredRows* rows_;
    std::int64_t head_bytes_;
    std::int64_t first_head_;
    std::int64_t end_head_;
    std::int64_t head_;
    std::int64_t row_;
    std::int64_t end_;
    bool without_gaps_;
    const std::byte* at_ = nullptr;
    const std::byte* piece_end_ = nullptr;
};

}  // namespace
}  // namespace lmcache_fast
