// Every kernel set gives the bits of the scalar definition, for every element value.
#include <cmath>
#include <cstring>
#include <vector>

#include "check.hpp"
#include "kernels/kernels.hpp"
#include "kernels/scalar_rotation.hpp"
#include "rotation.hpp"
#include "run_copy.hpp"

using namespace lmcache_fast;

namespace {

bool is_nan(const std::byte* at, Element element) {
    switch (element) {
        case Element::kBFloat16:
            return std::isnan(BFloat16::load(at));
        case Element::kFloat16:
            return std::isnan(Float16::load(at));
        default:
            return std::isnan(Float32::load(at));
    }
}

/// Which NaN comes out may depend on the order of the operands; that one comes out may not.
bool same(const std::byte* a, const std::byte* b, std::size_t bytes, const HeadShape& heads) {
    const auto width = static_cast<std::size_t>(heads.element_bytes());
    for (std::size_t at = 0; at < bytes; at += width) {
        if (std::memcmp(a + at, b + at, width) != 0 &&
            !(is_nan(a + at, heads.element) && is_nan(b + at, heads.element))) {
            return false;
        }
    }
    return true;
}

void same_bits_as_the_definition(const HeadShape& heads, std::int64_t step) {
    const auto row_bytes = static_cast<std::size_t>(heads.row_bytes());
    const std::int64_t half = heads.rotary_dim / 2;
    // Enough for two tasks, and all 65,536 bit patterns of the 16-bit types.
    const auto tokens = static_cast<std::int64_t>((std::size_t{640} << 10) / row_bytes + 3);
    const auto plane = static_cast<std::size_t>(tokens) * row_bytes;
    const std::size_t bytes = 2 * plane;  // keys, and values that stay as they are
    std::vector<std::byte> source(bytes + 64);
    std::vector<std::byte> target(bytes + 64);
    std::byte* from = source.data() + (64 - reinterpret_cast<std::uintptr_t>(source.data()) % 64);
    std::byte* to = target.data() + (64 - reinterpret_cast<std::uintptr_t>(target.data()) % 64);
    std::uint32_t state = 1;
    for (std::size_t i = 0; i < bytes; i += 2) {
        state = state * 1664525U + 1013904223U;
        const auto value = static_cast<std::uint16_t>(i / 2 < 65536 ? i / 2 : state >> 16);
        std::memcpy(from + i, &value, 2);
    }
    const std::int64_t table_rows = tokens + 5;
    std::vector<float> cosines;
    std::vector<float> sines;
    for (std::int64_t i = 0; i < table_rows * half; ++i) {
        cosines.push_back(std::cos(static_cast<float>(i) * 0.37F));
        sines.push_back(std::sin(static_cast<float>(i) * 0.37F));
    }
    const Rotation rotation(cosines, sines, table_rows, {2, -1}, step, heads);
    const ChunkShape shape = ChunkShape::contiguous(tokens, 2, 1, heads.row_bytes());
    const ChunkedSide from_side({from}, shape, false, nullptr);
    const ChunkedSide to_side({to}, shape, true, nullptr);
    const Run runs[] = {{0, 3, tokens - 3}, {tokens - 3, 0, 3}};

    std::vector<std::byte> expected(bytes);
    for (std::int64_t i = 0; i < tokens - 3; ++i) {
        const RotatedRow row{from + static_cast<std::size_t>(i) * row_bytes,
                             expected.data() + static_cast<std::size_t>(i + 3) * row_bytes,
                             rotation.cosines(2 + i * step), rotation.sines(2 + i * step)};
        scalar_rotate(heads, &row, 1);
    }
    for (std::size_t at = 0; at < bytes; at += plane) {
        std::memcpy(expected.data() + at, from + at + plane - 3 * row_bytes, 3 * row_bytes);
    }
    std::memcpy(expected.data() + plane + 3 * row_bytes, from + plane, plane - 3 * row_bytes);

    std::size_t count = 0;
    const Kernels* const* sets = supported_kernels(count);
    for (std::size_t i = 0; i < count; ++i) {
        CHECK(set_kernels(sets[i]->name));
        std::memset(to, 0, bytes);
        copy_runs(from_side, to_side, runs, 2, &rotation, 2);
        CHECK(same(expected.data(), to, plane, heads));
        CHECK(std::memcmp(expected.data() + plane, to + plane, plane) == 0);
    }
}

template <typename Type>
float round_trip(float value) {
    std::byte bytes[4];
    Type::store(bytes, value);
    return Type::load(bytes);
}

void rounds_to_nearest_even() {
    CHECK(round_trip<BFloat16>(1.00390625F) == 1.0F);       // a tie, to even below
    CHECK(round_trip<BFloat16>(1.01171875F) == 1.015625F);  // a tie, to even above
    CHECK(std::isinf(round_trip<BFloat16>(3.4e38F)));
    CHECK(round_trip<Float16>(1.00048828125F) == 1.0F);
    CHECK(round_trip<Float16>(65519.0F) == 65504.0F);
    CHECK(std::isinf(round_trip<Float16>(65520.0F)));
    CHECK(round_trip<Float16>(2.98023223876953125e-8F) == 0.0F);  // half the smallest: to even
    CHECK(round_trip<Float16>(3.1e-8F) == 5.9604644775390625e-8F);
    std::uint32_t bits = 0x7fffffffU;  // rounding by addition alone would make this NaN a zero
    float nan = 0;
    std::memcpy(&nan, &bits, 4);
    CHECK(std::isnan(round_trip<BFloat16>(nan)));
    CHECK(std::isnan(round_trip<Float16>(nan)));
    for (std::uint32_t half = 0; half < 65536; ++half) {  // every float16 survives
        std::byte before[2];
        std::byte after[2];
        std::memcpy(before, &half, 2);
        Float16::store(after, Float16::load(before));
        CHECK(std::memcmp(before, after, 2) == 0 || std::isnan(Float16::load(after)));
    }
}

void refuses_what_makes_no_sense() {
    const HeadShape heads{2, 8, 8, false, Element::kBFloat16};
    const auto make = [](const HeadShape& shape, std::size_t elements, std::int64_t rows) {
        return Rotation(std::vector<float>(elements), std::vector<float>(elements), rows, {0}, 1,
                        shape);
    };
    CHECK(!throws([&] { make(heads, 12, 3); }));
    CHECK(throws([&] { make(heads, 11, 3); }));
    CHECK(throws([&] { make({2, 8, 7, false, Element::kBFloat16}, 9, 3); }));
    CHECK(throws([&] { make({2, 8, 10, false, Element::kBFloat16}, 15, 3); }));
    CHECK(throws([&] { make({0, 8, 8, false, Element::kBFloat16}, 12, 3); }));
    CHECK(throws([] { parse_element("int8"); }));
    const Rotation rotation = make(heads, 12, 3);
    CHECK(!throws([&] { rotation.check_run(0, 3); }));
    CHECK(throws([&] { rotation.check_run(0, 4); }));
    CHECK(throws([&] { rotation.check_run(0, INT64_MAX); }));
}

}  // namespace

int main() {
    rounds_to_nearest_even();
    refuses_what_makes_no_sense();
    for (const Element element : {Element::kBFloat16, Element::kFloat16, Element::kFloat32}) {
        for (const bool interleaved : {false, true}) {
            same_bits_as_the_definition({8, 128, 128, interleaved, element}, 1);
            same_bits_as_the_definition({2, 64, 32, interleaved, element}, 0);  // partly rotated
            same_bits_as_the_definition({3, 20, 20, interleaved, element}, 1);  // odd widths
            same_bits_as_the_definition({1, 576, 576, interleaved, element}, 1);
        }
    }
}
