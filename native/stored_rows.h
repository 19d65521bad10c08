// Weights as files store them (GGUF blocks, or dense rows), taken to their packed form by several threads in one call.
#pragma once
#include <string>
#include <vector>

#include "kernel_table.h"
#include "packed_weight.h"

namespace octavo {

enum class Stored { Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, BF16, F16, F32 };

// Of a kind by its GGUF name; throws std::invalid_argument for others.
Stored stored_kind(const std::string& name);
// Bytes of a row of k values; throws std::invalid_argument when k is no whole number of blocks.
int64_t stored_row_bytes(Stored kind, int64_t k);

// Rows of one tensor and where they go: `rows` of the `stored` ones at `data`. `order` is the stored row of each row, null when they
// are the same; `target` the packed column of each. The weight may be in another form that holds the same values: wider codes, smaller
// groups, minimums in place of a zero point. `mapped` says that the bytes are a file's: its pages are let go once they have been read.
struct StoredRows {
    PackedWeight* weight;
    Stored kind;
    const uint8_t* data;
    int64_t stored, rows;
    const int64_t* order;
    const int32_t* target;
    bool mapped;
};

// Unpacks one row of blocks of k values; minimums are written only by kinds that have them.
void unpack_row(Stored kind, const uint8_t* row, int64_t k, uint8_t* codes, float* scales, float* minimums);

// Packs all of it with `threads` threads; dense rows for an affine weight are rounded to its groups. Throws what a thread met, when all
// have ended: std::overflow_error where weights to be rounded are not finite or too large.
void pack_stored(const std::vector<StoredRows>& all, int threads, const KernelTable& kernels);

}  // namespace octavo
