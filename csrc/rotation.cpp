#include "rotation.hpp"

#include <stdexcept>
#include <utility>

namespace lmcache_fast {

Element parse_element(const std::string& dtype) {
    if (dtype == "bfloat16") return Element::kBFloat16;
    if (dtype == "float16") return Element::kFloat16;
    if (dtype == "float32") return Element::kFloat32;
    throw std::invalid_argument("Rotation: dtype is '" + dtype +
                                "'; expected bfloat16, float16 or float32");
}

Rotation::Rotation(std::vector<float> cosines, std::vector<float> sines, std::int64_t table_rows,
                   std::vector<std::int32_t> run_rows, std::int64_t row_step,
                   const HeadShape& heads, std::int64_t offset)
    : cosines_(std::move(cosines)),
      sines_(std::move(sines)),
      table_rows_(table_rows),
      run_rows_(std::move(run_rows)),
      row_step_(row_step),
      heads_(heads),
      offset_(offset) {
    constexpr std::int64_t kMost = 1 << 20;  // of each, so that no product overflows
    if (heads_.num_heads < 1 || heads_.num_heads > kMost || heads_.head_dim < 1 ||
        heads_.head_dim > kMost) {
        throw std::invalid_argument("Rotation: num_heads is " + std::to_string(heads_.num_heads) +
                                    " and head_dim is " + std::to_string(heads_.head_dim) +
                                    "; expected positive numbers");
    }
    if (offset_ < 0 || offset_ > kMost || (offset_ > 0 && heads_.num_heads != 1)) {
        throw std::invalid_argument("Rotation: rotary_offset is " + std::to_string(offset_) +
                                    " and num_heads is " + std::to_string(heads_.num_heads) +
                                    "; expected an offset below head_dim, and with one head only");
    }
    if (heads_.rotary_dim < 2 || heads_.rotary_dim % 2 != 0 ||
        heads_.rotary_dim > heads_.head_dim) {
        throw std::invalid_argument(
            "Rotation: rotary_dim is " + std::to_string(heads_.rotary_dim) +
            "; expected an even number from 2 to head_dim = " + std::to_string(heads_.head_dim));
    }
    const auto expected = static_cast<std::size_t>(table_rows_ * half());
    if (table_rows_ < 0 || cosines_.size() != expected || sines_.size() != expected) {
        throw std::invalid_argument("Rotation: cos has " + std::to_string(cosines_.size()) +
                                    " and sin " + std::to_string(sines_.size()) +
                                    " elements; expected [" + std::to_string(table_rows_) + ", " +
                                    std::to_string(half()) + "] each");
    }
}

void Rotation::check_run(std::size_t run, std::int64_t count) const {
    if (!rotates(run) || count <= 0) return;
    const std::int64_t first = run_rows_[run];
    std::int64_t last = 0;
    if (__builtin_mul_overflow(count - 1, row_step_, &last) ||
        __builtin_add_overflow(first, last, &last) || first >= table_rows_ || last < 0 ||
        last >= table_rows_) {
        throw std::invalid_argument("Rotation: run " + std::to_string(run) + " of " +
                                    std::to_string(count) + " tokens uses table rows from " +
                                    std::to_string(first) + " in steps of " +
                                    std::to_string(row_step_) + "; the tables have " +
                                    std::to_string(table_rows_) + " rows");
    }
}

}  // namespace lmcache_fast
