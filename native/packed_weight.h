// A weight matrix in panels of 16 columns, filled row by row from a checkpoint.
#pragma once
#include <memory>

#include "common.h"
#include "memory.h"

namespace octavo {

class PackedWeight {
  public:
    // columns: real packed columns (output features); group 0 means one scale per column. rotation says that the
    // codes are those of the rotated matrix (blocks of so many along k times a Hadamard matrix; 0: they are not). table: 16 numbers,
    // for Lut4 and Lut4F only. Throws std::invalid_argument.
    PackedWeight(std::shared_ptr<Region> region, Form form, int64_t columns, int64_t k, int64_t group, int zero, bool minimum,
                 bool scale_f16, int rotation, const float* table = nullptr);

    static size_t bytes_needed(Form form, int64_t columns, int64_t k, int64_t group, bool minimum, bool scale_f16);

    // Row r of the source goes to packed column target[r]; throws std::out_of_range for a column outside.
    void pack_f32(const int32_t* target, int64_t rows, const float* values);
    void pack_bf16(const int32_t* target, int64_t rows, const uint16_t* values);
    // codes [rows][k], scales and minimums [rows][groups], f32 or the bits of f16 (no minimums: null).
    template <class Scale>
    void pack_affine(const int32_t* target, int64_t rows, const uint8_t* codes, const Scale* scales, const Scale* minimums);

    // codes [rows][k] of a table, one a byte also when they have 4 bits; scales [rows][groups].
    void pack_codes(const int32_t* target, int64_t rows, const uint8_t* codes, const float* scales);

    // One column as f32, for tests and inspection.
    void column(int64_t index, float* out) const;

    const WeightView& view() const { return view_; }
    int64_t real_columns() const { return real_columns_; }
    size_t bytes() const { return bytes_; }
    size_t offset() const { return (size_t)(data_ - region_->data()); }

  private:
    uint8_t* at(int64_t column) const { return data_ + column / kPanel * view_.panel_bytes + column % kPanel * 4; }
    void check(const int32_t* target, int64_t rows) const;

    std::shared_ptr<Region> region_;
    WeightView view_;
    int64_t real_columns_ = 0;
    uint8_t* data_ = nullptr;
    uint8_t* scales_ = nullptr;
    uint8_t* minimums_ = nullptr;
    size_t bytes_ = 0;
};

}  // namespace octavo
