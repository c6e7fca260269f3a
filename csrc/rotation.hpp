// Rotary position embedding applied to keys while they are copied.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "head_shape.hpp"

namespace lmcache_fast {

/// Throws std::invalid_argument for anything but bfloat16, float16 and float32.
Element parse_element(const std::string& dtype);

/// Tables of cosines and sines and which of their rows each run uses. Does not move.
class Rotation {
  public:
    /// `cosines` and `sines` are [table_rows, rotary_dim / 2]. Token i of run r uses table row
    /// run_rows[r] + i * row_step; a negative run_rows[r] leaves the run alone. Before the heads a
    /// row has `offset` elements that stay as they are; they are for rows of one head.
    /// Throws std::invalid_argument for a shape that makes no sense.
    Rotation(std::vector<float> cosines, std::vector<float> sines, std::int64_t table_rows,
             std::vector<std::int32_t> run_rows, std::int64_t row_step, const HeadShape& heads,
             std::int64_t offset = 0);

    const HeadShape& heads() const { return heads_; }
    std::int64_t offset_bytes() const { return offset_ * heads_.element_bytes(); }
    std::int64_t row_bytes() const { return offset_bytes() + heads_.row_bytes(); }
    std::size_t num_runs() const { return run_rows_.size(); }
    bool rotates(std::size_t run) const { return run_rows_[run] >= 0; }
    /// Table row of a run's token. Only after check_run.
    std::int64_t table_row(std::size_t run, std::int64_t token) const {
        return run_rows_[run] + token * row_step_;
    }
    const float* cosines(std::int64_t row) const { return cosines_.data() + row * half(); }
    const float* sines(std::int64_t row) const { return sines_.data() + row * half(); }

    /// Throws std::invalid_argument unless all of the run's rows are in the table.
    void check_run(std::size_t run, std::int64_t count) const;

  private:
    std::int64_t half() const { return heads_.rotary_dim / 2; }

    std::vector<float> cosines_;
    std::vector<float> sines_;
    std::int64_t table_rows_;
    std::vector<std::int32_t> run_rows_;
    std::int64_t row_step_;
    HeadShape heads_;
    std::int64_t offset_;
};

}  // namespace lmcache_fast
