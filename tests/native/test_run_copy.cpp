// Every kernel set, thread count and stride moves exactly the rows it was told to.
#include <cstring>
#include <vector>

#include "check.hpp"
#include "kernels/kernels.hpp"
#include "run_copy.hpp"

using namespace lmcache_fast;

namespace {

constexpr std::int64_t kPlanes = 2;
constexpr std::int64_t kLayers = 3;

struct Side {
    std::vector<std::byte> memory;
    ChunkShape shape;
    std::vector<std::byte*> bases;
    ChunkedSide side;

    Side(std::int64_t chunks, const ChunkShape& chunk, std::size_t offset)
        : memory(static_cast<std::size_t>(chunks) * padded(chunk) + 64 + offset),
          shape(chunk),
          bases(base_list(chunks, offset)),
          side(bases, chunk, true, nullptr) {}

    static std::size_t padded(const ChunkShape& chunk) {
        return (static_cast<std::size_t>(chunk.extent()) + 63) / 64 * 64;
    }
    std::vector<std::byte*> base_list(std::int64_t chunks, std::size_t offset) {
        std::byte* first = memory.data();
        first += (64 - reinterpret_cast<std::uintptr_t>(first) % 64) % 64 + offset;
        std::vector<std::byte*> list;
        for (std::int64_t i = chunks; i-- > 0;) {  // in no particular order in memory
            list.push_back(first + static_cast<std::size_t>(i) * padded(shape));
        }
        return list;
    }
    std::byte* row(std::int64_t plane, std::int64_t layer, std::int64_t token) const {
        return bases[static_cast<std::size_t>(token / shape.tokens_per_chunk)] +
               plane * shape.plane_stride + layer * shape.layer_stride +
               token % shape.tokens_per_chunk * shape.token_stride;
    }
};

std::byte pattern(std::size_t i) {
    return static_cast<std::byte>(i * 2654435761U >> 13);
}

void check_copy(const Side& from, Side& to, const std::vector<Run>& runs, unsigned threads) {
    std::memset(to.memory.data(), 0x5a, to.memory.size());
    copy_runs(from.side, to.side, runs.data(), runs.size(), nullptr, threads);
    std::vector<std::byte> expected(to.memory.size(), std::byte{0x5a});
    for (const Run& run : runs) {
        for (std::int64_t plane = 0; plane < kPlanes; ++plane) {
            for (std::int64_t layer = 0; layer < kLayers; ++layer) {
                for (std::int64_t i = 0; i < run.count; ++i) {
                    std::memcpy(
                        expected.data() + (to.row(plane, layer, run.target + i) - to.memory.data()),
                        from.row(plane, layer, run.source + i),
                        static_cast<std::size_t>(from.shape.row_bytes));
                }
            }
        }
    }
    // Not ==, which the thread sanitizer watches byte by byte.
    CHECK(std::memcmp(expected.data(), to.memory.data(), expected.size()) == 0);
}

std::vector<Run> every_second(std::int64_t tokens) {
    std::vector<Run> runs;
    for (std::int64_t i = 0; i < tokens / 2; ++i) runs.push_back({2 * i + 1, i, 1});
    return runs;
}

void copies_what_it_was_told(std::int64_t row_bytes, std::size_t offset) {
    const std::int64_t tokens = 80;  // enough for several threads
    Side chunks(5, ChunkShape::contiguous(16, kPlanes, kLayers, row_bytes), 0);
    Side whole(1, ChunkShape::contiguous(tokens, kPlanes, kLayers, row_bytes), offset);
    // Heads packed with both planes side by side in a row.
    Side packed(
        1, {tokens, kPlanes, kLayers, row_bytes, row_bytes, tokens * 2 * row_bytes, 2 * row_bytes},
        0);
    for (std::size_t i = 0; i < chunks.memory.size(); ++i) chunks.memory[i] = pattern(i);

    const std::vector<std::vector<Run>> plans = {
        {},
        {{3, 5, 0}},
        {{0, 0, tokens}},
        {{15, 0, 2}, {1, 2, 60}, {70, 62, 10}},
        {{0, tokens - 1, 1}},
        every_second(tokens),
    };
    for (const auto& runs : plans) {
        for (const unsigned threads : {1U, 3U}) {
            check_copy(chunks, whole, runs, threads);
            check_copy(chunks, packed, runs, threads);
        }
    }
    check_copy(chunks, whole, {{0, 0, tokens}}, 0);
    check_copy(whole, chunks, {{0, 11, tokens - 11}}, 2);
    check_copy(packed, chunks, {{1, 0, tokens - 1}}, 2);
}

void copies_more_than_one_task_takes() {
    const std::int64_t tokens = 640;
    Side chunks(5, ChunkShape::contiguous(128, kPlanes, kLayers, 2048), 0);
    Side whole(1, ChunkShape::contiguous(tokens, kPlanes, kLayers, 2048), 0);
    for (std::size_t i = 0; i < chunks.memory.size(); ++i) chunks.memory[i] = pattern(i);
    check_copy(chunks, whole, {{0, 0, tokens}}, 3);
    check_copy(chunks, whole, every_second(tokens), 3);
}

void refuses_before_it_touches_anything() {
    Side from(2, ChunkShape::contiguous(4, kPlanes, kLayers, 64), 0);
    Side to(1, ChunkShape::contiguous(8, kPlanes, kLayers, 64), 0);
    const auto refused = [&](std::vector<Run> runs) {
        runs.insert(runs.begin(), Run{0, 0, 8});
        std::memset(from.memory.data(), 1, from.memory.size());
        std::memset(to.memory.data(), 2, to.memory.size());
        const std::vector<std::byte> before = to.memory;
        return throws(
                   [&] { copy_runs(from.side, to.side, runs.data(), runs.size(), nullptr, 1); }) &&
               before == to.memory;
    };
    CHECK(refused({{0, 1, 8}}));
    CHECK(refused({{1, 0, 8}}));
    CHECK(refused({{-1, 0, 1}}));
    CHECK(refused({{0, -1, 1}}));
    CHECK(refused({{0, 0, -1}}));
    CHECK(refused({{8, 0, 1}}));
    CHECK(refused({{INT64_MAX, 0, INT64_MAX}}));

    const Run run{0, 0, 1};
    const ChunkedSide readonly(to.bases, to.shape, false, nullptr);
    CHECK(throws([&] { copy_runs(from.side, readonly, &run, 1, nullptr, 1); }));
    CHECK(throws([&] { copy_runs(from.side, from.side, &run, 1, nullptr, 1); }));
    Side narrow(1, ChunkShape::contiguous(8, kPlanes, kLayers, 32), 0);
    CHECK(throws([&] { copy_runs(from.side, narrow.side, &run, 1, nullptr, 1); }));
    CHECK(throws([&] { ChunkShape::contiguous(0, 1, 1, 1); }));
    CHECK(throws([&] { ChunkShape::contiguous(INT64_MAX, 2, 1, 1).check(); }));
    CHECK(throws([&] { ChunkedSide({nullptr}, to.shape, true, nullptr); }));
}

}  // namespace

int main() {
    std::size_t count = 0;
    const Kernels* const* sets = supported_kernels(count);
    for (std::size_t i = 0; i < count; ++i) {
        CHECK(set_kernels(sets[i]->name));
        for (const std::int64_t row_bytes : {2048, 1152, 4100, 6}) {
            copies_what_it_was_told(row_bytes, 0);
            if (row_bytes == 2048) copies_what_it_was_told(row_bytes, 16);
        }
        copies_more_than_one_task_takes();
    }
    CHECK(!set_kernels("abacus"));
    refuses_before_it_touches_anything();
}
