// Linear kernels on f32 and bf16 panels: products of bf16 pairs (or f32), f32 sums.
#include "gemm.h"

namespace octavo::OCTAVO_ISA {
namespace {

template <class Dot, int MR, int NV>
void float_tiles(const LinearArgs& args, int64_t row, int tiles, int64_t column, float* tile, Ahead& ahead) {
    const int64_t row_bytes = args.a.row_bytes(), units = args.w.k_padded / Dot::kPerUnit;
    const uint8_t* first[NV];
    for (int j = 0; j < NV; ++j) {
        const int64_t c = column + j * L;
        first[j] = args.w.data + c / kPanel * args.w.panel_bytes + c % kPanel * 4;
    }
    for (int t = 0; t < tiles; ++t) {
        const uint8_t* a[MR];
        for (int i = 0; i < MR; ++i) a[i] = args.a.data + (row + t * MR + i) * row_bytes;
        vf acc[MR][NV] = {};
        const uint8_t* w[NV];
        for (int j = 0; j < NV; ++j) w[j] = first[j];
        const int64_t step = ahead.few() ? kFloatUnits : units;
        for (int64_t u = 0; u < units; u += step) {
            ahead.fetch();
            const int64_t piece = units - u < step ? units - u : step;
            dot_tile<Dot, MR, NV>(acc, a, w, piece);
            for (int i = 0; i < MR; ++i) a[i] += piece * 4;
            for (int j = 0; j < NV; ++j) w[j] += piece * kPanelRowBytes;
        }
        for (int i = 0; i < MR; ++i)
            for (int j = 0; j < NV; ++j) store(tile + (t * MR + i) * kColumnTile + j * L, acc[i][j]);
    }
}

template <class Dot, int NV>
void float_columns(const LinearArgs& args, int64_t row, int rows, int64_t column, int columns, float* tile, Ahead& ahead) {
    for (int c = 0; c < columns; c += NV * L)
        for_tile_runs<kFloatRows>(rows, [&](auto mr, int done, int tiles) {
            float_tiles<Dot, mr, NV>(args, row + done, tiles, column + c, tile + done * kColumnTile + c, ahead);
        });
}

template <class Dot>
void float_block(const LinearArgs& args, int64_t row, int rows, int64_t column, int columns, float* tile, Ahead& ahead) {
    if (columns % (kFloatVectors * L) == 0)
        float_columns<Dot, kFloatVectors>(args, row, rows, column, columns, tile, ahead);
    else
        float_columns<Dot, 2>(args, row, rows, column, columns, tile, ahead);
}

}  // namespace

void gemm_f32(const LinearArgs& args, int64_t row, int rows, int64_t column, int columns, float* tile, Ahead& ahead) {
    float_block<DotF32>(args, row, rows, column, columns, tile, ahead);
}
void gemm_bf16(const LinearArgs& args, int64_t row, int rows, int64_t column, int columns, float* tile, Ahead& ahead) {
    float_block<DotBf16>(args, row, rows, column, columns, tile, ahead);
}

}  // namespace octavo::OCTAVO_ISA
