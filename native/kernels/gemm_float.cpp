// Linear kernels on f32 and bf16 panels: products of bf16 pairs (or f32), f32 sums.
#include "gemm.h"

namespace octavo::OCTAVO_ISA {
namespace {

template <class Dot, int MR, int NV>
void float_tile(const LinearArgs& args, int64_t row, int64_t column, float* tile) {
    const uint8_t* a[MR];
    const int64_t row_bytes = args.a.row_bytes();
    for (int i = 0; i < MR; ++i) a[i] = args.a.data + (row + i) * row_bytes;
    const uint8_t* w[NV];
    for (int j = 0; j < NV; ++j) {
        const int64_t c = column + j * L;
        w[j] = args.w.data + c / kPanel * args.w.panel_bytes + c % kPanel * 4;
    }
    vf acc[MR][NV] = {};
    dot_tile<Dot, MR, NV>(acc, a, w, args.w.k_padded / Dot::kPerUnit);
    for (int i = 0; i < MR; ++i)
        for (int j = 0; j < NV; ++j) store(tile + i * kColumnTile + j * L, acc[i][j]);
}

template <class Dot, int NV>
void float_columns(const LinearArgs& args, int64_t row, int rows, int64_t column, int columns, float* tile) {
    for (int c = 0; c < columns; c += NV * L)
        for_row_tiles<kFloatRows>(rows, [&](auto mr, int done) {
            float_tile<Dot, mr, NV>(args, row + done, column + c, tile + done * kColumnTile + c);
        });
}

template <class Dot>
void float_block(const LinearArgs& args, int64_t row, int rows, int64_t column, int columns, float* tile) {
    if (columns % (kFloatVectors * L) == 0)
        float_columns<Dot, kFloatVectors>(args, row, rows, column, columns, tile);
    else
        float_columns<Dot, 2>(args, row, rows, column, columns, tile);
}

}  // namespace

void gemm_f32(const LinearArgs& args, int64_t row, int rows, int64_t column, int columns, float* tile) {
    float_block<DotF32>(args, row, rows, column, columns, tile);
}
void gemm_bf16(const LinearArgs& args, int64_t row, int rows, int64_t column, int columns, float* tile) {
    float_block<DotBf16>(args, row, rows, column, columns, tile);
}

}  // namespace octavo::OCTAVO_ISA
