#include "copy_plan.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

namespace lmcache_fast {
namespace {

// A piece is one of several streams that are written at a time. The hardware prefetchers and write
// buffers like streams of one page.
constexpr std::int64_t kPieceBytes = 4096;
constexpr std::int64_t kLongRun = 8 * kPieceBytes;

[[noreturn]] void fail(const std::string& what) {
    throw std::invalid_argument("copy_runs: " + what);
}

void check_sides(const ChunkedSide& source, const ChunkedSide& target) {
    const ChunkShape& from = source.shape();
    const ChunkShape& to = target.shape();
    const auto same = [](const char* name, std::int64_t a, std::int64_t b) {
        if (a != b) {
            fail("source has " + std::to_string(a) + " " + name + " and target " +
                 std::to_string(b) + "; expected the same");
        }
    };
    same("planes", from.planes, to.planes);
    same("layers", from.layers, to.layers);
    same("row_bytes", from.row_bytes, to.row_bytes);
    if (std::max(from.row_pieces, to.row_pieces) % std::min(from.row_pieces, to.row_pieces) != 0) {
        fail("source has rows of " + std::to_string(from.row_pieces) + " pieces and target of " +
             std::to_string(to.row_pieces) + "; expected a multiple of one another");
    }
    if (!target.writable()) fail("target is read-only");
    if (to.row_bytes > INT32_MAX) fail("a row of more than 2 GiB");
}

/// Strided sides may interleave without sharing a byte, so only whole blocks are compared.
void check_overlap(const ChunkedSide& source, const ChunkedSide& target) {
    if (!source.shape().is_contiguous() || !target.shape().is_contiguous()) return;
    std::vector<std::byte*> from = source.bases();
    std::sort(from.begin(), from.end());
    for (const std::byte* base : target.bases()) {
        const std::byte* end = base + target.shape().extent();
        const auto after = std::lower_bound(from.begin(), from.end(), end);
        if (after != from.begin() && *std::prev(after) + source.shape().extent() > base) {
            fail("source and target overlap");
        }
    }
}

/// In how many pieces rows are moved.
std::int64_t row_pieces(const ChunkedSide& source, const ChunkedSide& target) {
    return std::max(source.shape().row_pieces, target.shape().row_pieces);
}

void check_runs(const ChunkedSide& source, const ChunkedSide& target, const Run* runs,
                std::size_t num_runs, const Rotation* rotation) {
    const auto check = [](std::size_t index, const char* side, std::int64_t first,
                          std::int64_t count, std::int64_t tokens) {
        if (first < 0 || count < 0 || count > tokens || first > tokens - count) {
            fail("run " + std::to_string(index) + " is " + std::to_string(count) +
                 " tokens from token " + std::to_string(first) + " of the " + side +
                 ", which has " + std::to_string(tokens));
        }
    };
    for (std::size_t i = 0; i < num_runs; ++i) {
        check(i, "source", runs[i].source, runs[i].count, source.num_tokens());
        check(i, "target", runs[i].target, runs[i].count, target.num_tokens());
    }
    if (rotation == nullptr) return;
    if (rotation->num_runs() != num_runs) {
        fail("rotation is for " + std::to_string(rotation->num_runs()) + " runs; expected " +
             std::to_string(num_runs));
    }
    if (rotation->row_bytes() != source.shape().row_bytes) {
        fail("rotation is for rows of " + std::to_string(rotation->row_bytes()) +
             " bytes; expected " + std::to_string(source.shape().row_bytes));
    }
    if (rotation->heads().num_heads % row_pieces(source, target) != 0) {
        fail("rotation is for " + std::to_string(rotation->heads().num_heads) +
             " heads; expected a multiple of a row's " +
             std::to_string(row_pieces(source, target)) + " pieces");
    }
    for (std::size_t i = 0; i < num_runs; ++i) rotation->check_run(i, runs[i].count);
}

/// Calls span(source, target, token, rows) for every stretch of a run that stays inside one chunk
/// on both sides; `token` counts from the beginning of the run.
template <typename Span>
void for_each_span(const ChunkedSide& source, const ChunkedSide& target, const Run& run,
                   const Span& span) {
    const std::int64_t from_chunk = source.shape().tokens_per_chunk;
    const std::int64_t to_chunk = target.shape().tokens_per_chunk;
    for (std::int64_t token = 0; token < run.count;) {
        const std::int64_t from = run.source + token;
        const std::int64_t to = run.target + token;
        const std::int64_t rows =
            std::min({run.count - token, from_chunk - from % from_chunk, to_chunk - to % to_chunk});
        span(source.bases()[static_cast<std::size_t>(from / from_chunk)] +
                 from % from_chunk * source.shape().token_stride,
             target.bases()[static_cast<std::size_t>(to / to_chunk)] +
                 to % to_chunk * target.shape().token_stride,
             token, rows);
        token += rows;
    }
}

}  // namespace

CopyPlan plan_copy(const ChunkedSide& source, const ChunkedSide& target, const Run* runs,
                   std::size_t num_runs, const Rotation* rotation) {
    check_sides(source, target);
    check_overlap(source, target);
    check_runs(source, target, runs, num_runs, rotation);

    const std::int64_t row_bytes = source.shape().row_bytes;
    const std::int64_t from_stride = source.shape().token_stride;
    const std::int64_t to_stride = target.shape().token_stride;
    const std::int64_t pieces = row_pieces(source, target);
    const std::int64_t piece_bytes = row_bytes / pieces;
    const bool dense = pieces == 1 && from_stride == row_bytes && to_stride == row_bytes;
    CopyPlan plan;
    for (std::size_t i = 0; i < num_runs; ++i) plan.bytes += runs[i].count * row_bytes;
    // Pieces that are moved together are equally long. Where runs are short every piece is a row.
    const bool scattered =
        num_runs > 0 && plan.bytes / static_cast<std::int64_t>(num_runs) < kLongRun;
    const std::int64_t most = scattered ? std::min(row_bytes, kPieceBytes) : kPieceBytes;
    plan.pieces.reserve(static_cast<std::size_t>(plan.bytes / most) + num_runs);

    const auto add = [&](const std::byte* from, std::byte* to, std::int64_t bytes,
                         std::int64_t row) {
        plan.pieces.push_back(
            {from, to, static_cast<std::uint32_t>(bytes), static_cast<std::int32_t>(row)});
    };
    const auto add_cut = [&](const std::byte* from, std::byte* to, std::int64_t bytes) {
        for (std::int64_t at = 0; at < bytes; at += most) {
            add(from + at, to + at, std::min(most, bytes - at), -1);
        }
    };
    for (std::size_t i = 0; i < num_runs; ++i) {
        const bool rotated = rotation != nullptr && rotation->rotates(i);
        for_each_span(
            source, target, runs[i],
            [&](const std::byte* from, std::byte* to, std::int64_t token, std::int64_t rows) {
                if (dense && !rotated) {
                    add_cut(from, to, rows * row_bytes);
                    return;
                }
                const auto for_each_piece = [&](const auto& move) {
                    for (std::int64_t row = 0; row < rows; ++row) {
                        for (std::int64_t piece = 0; piece < pieces; ++piece) {
                            move(from + row * from_stride +
                                     source.shape().piece_offset(piece, pieces),
                                 to + row * to_stride + target.shape().piece_offset(piece, pieces),
                                 token + row);
                        }
                    }
                };
                const std::int64_t plain = rotated ? rotation->offset_bytes() : piece_bytes;
                if (plain > 0) {
                    for_each_piece(
                        [&](const std::byte* source_piece, std::byte* target_piece, std::int64_t) {
                            add_cut(source_piece, target_piece, plain);
                        });
                }
                if (!rotated) return;
                for_each_piece([&](const std::byte* source_piece, std::byte* target_piece,
                                   std::int64_t index) {
                    add(source_piece + plain, target_piece + plain, piece_bytes - plain,
                        rotation->table_row(i, index));
                });
            });
    }
    return plan;
}

}  // namespace lmcache_fast
