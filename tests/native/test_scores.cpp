// Every kernel set and thread count gives the same scores, and reads nothing outside the chunks.
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "check.hpp"
#include "kernels/kernels.hpp"
#include "scores.hpp"

using namespace lmcache_fast;

namespace {

constexpr std::int64_t kLayers = 2;

struct Cache {
    std::vector<std::vector<std::uint16_t>> chunks;  // each alone, for the sanitizer to guard
    ChunkShape shape;

    Cache(std::int64_t count, std::int64_t tokens, std::int64_t width, bool spoiled)
        : shape(ChunkShape::contiguous(tokens, 2, kLayers, 2 * width)) {
        std::mt19937 random(1);
        for (std::int64_t i = 0; i < count; ++i) {
            chunks.emplace_back(static_cast<std::size_t>(2 * kLayers * tokens * width));
            for (std::uint16_t& element : chunks.back()) {
                // bfloat16 of any kind, or of either sign from 1 to 4
                const auto bits = static_cast<std::uint16_t>(random());
                element = spoiled ? bits : static_cast<std::uint16_t>((bits & 0x80ff) | 0x3f80);
            }
        }
    }
    ChunkedSide side() {
        std::vector<std::byte*> bases;
        for (auto& chunk : chunks) bases.push_back(reinterpret_cast<std::byte*>(chunk.data()));
        return ChunkedSide(bases, shape, false, nullptr);
    }
};

std::vector<double> all_scores(const Scoring& how, const std::vector<float>& queries,
                               std::int64_t query_heads, std::int64_t window) {
    const auto size = static_cast<std::size_t>(kLayers * how.side.num_tokens());
    std::vector<double> scores(5 * size);
    knorm_scores(how, scores.data());
    keydiff_scores(how, scores.data() + size);
    lagkv_scores(how, 3, 5, false, scores.data() + 2 * size);
    lagkv_scores(how, 0, 8, true, scores.data() + 3 * size);
    attention_scores(how, queries.data(), query_heads, window, 3, scores.data() + 4 * size);
    for (double& score : scores) {
        if (std::isnan(score)) score = -1234;  // one NaN is as good as another
    }
    return scores;
}

void check_all_alike(std::int64_t chunks, std::int64_t tokens, std::int64_t heads,
                     std::int64_t head_dim, std::int64_t group, std::int64_t window, bool spoiled) {
    Cache cache(chunks, tokens, heads * head_dim, spoiled);
    const ChunkedSide side = cache.side();
    std::vector<float> queries(
        static_cast<std::size_t>(kLayers * heads * group * window * head_dim));
    for (std::size_t i = 0; i < queries.size(); ++i) {
        queries[i] = std::sin(static_cast<float>(i));
    }
    std::vector<double> expected;
    for (const Reduce reduce : {Reduce::kMean, Reduce::kMax}) {
        expected.clear();
        std::size_t count = 0;
        const Kernels* const* sets = supported_kernels(count);
        for (std::size_t set = 0; set < count; ++set) {
            CHECK(set_kernels(sets[set]->name));
            for (const unsigned threads : {1U, 3U}) {
                const Scoring how{side, Element::kBFloat16, head_dim, reduce, threads};
                const auto scores = all_scores(how, queries, heads * group, window);
                if (expected.empty()) expected = scores;
                CHECK(scores == expected);
            }
        }
    }
}

void check_refusals() {
    Cache cache(1, 4, 16, false);
    const ChunkedSide side = cache.side();
    std::vector<double> out(static_cast<std::size_t>(kLayers * 4));
    const auto with_dim = [&](std::int64_t head_dim) {
        return Scoring{side, Element::kBFloat16, head_dim, Reduce::kMean, 1};
    };
    for (const std::int64_t wrong : {0L, -1L, 3L, 17L, 1L << 62}) {
        CHECK(throws([&] { knorm_scores(with_dim(wrong), out.data()); }));
    }
    CHECK(throws([&] { lagkv_scores(with_dim(8), -1, 2, false, out.data()); }));
    CHECK(throws([&] { lagkv_scores(with_dim(8), 0, 0, false, out.data()); }));
    const std::vector<float> queries(96);
    CHECK(throws([&] { attention_scores(with_dim(8), queries.data(), 3, 1, 1, out.data()); }));
    CHECK(throws([&] { attention_scores(with_dim(8), queries.data(), 2, 1, 2, out.data()); }));
    CHECK(throws([&] { attention_scores(with_dim(8), queries.data(), 2, 0, 1, out.data()); }));
}

}  // namespace

int main() {
    for (const bool spoiled : {false, true}) {
        check_all_alike(0, 4, 1, 8, 1, 1, spoiled);
        check_all_alike(1, 1, 1, 1, 1, 1, spoiled);
        check_all_alike(3, 7, 3, 20, 2, 1, spoiled);   // few queries
        check_all_alike(2, 16, 2, 24, 3, 2, spoiled);  // some
        check_all_alike(5, 9, 2, 13, 4, 17, spoiled);  // many, in two tiles
    }
    check_refusals();
    return 0;
}
