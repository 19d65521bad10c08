// Linear kernel on int8 panels [columns/16][k/4][16][4].
#include "gemm_int.h"

namespace octavo::OCTAVO_ISA {
namespace {

struct Codes8 {
    static constexpr int kBias = kDotBias;
    static constexpr int kAhead = 0;
    template <int U, int MR, int NV>
    static OCTAVO_INLINE void dot(vi (&acc)[MR][NV], const uint8_t* a, int64_t row_bytes, const uint8_t* (&w)[NV]) {
        SplitSums<MR, NV> sums(acc);
#pragma GCC unroll 8
        for (int s = 0; s < U / 4; ++s) {
            vu wv[NV];
#pragma GCC unroll 8
            for (int j = 0; j < NV; ++j) {
                wv[j] = load<vu>(w[j]);
                w[j] += kPanelRowBytes;
            }
#pragma GCC unroll 8
            for (int i = 0; i < MR; ++i) {
                vu av = splat(load_u32(a + i * row_bytes + s * 4));
#pragma GCC unroll 8
                for (int j = 0; j < NV; ++j) sums.at(s, i, j) = dot4(sums.at(s, i, j), wv[j], av);
            }
        }
        sums.join();
    }
};

}  // namespace

void gemm_w8(const LinearArgs& args, int64_t row, int rows, int64_t column, int columns, float* tile, Ahead& ahead) {
    if (args.a.group <= 32) int_block<Codes8>(args, row, rows, column, columns, tile, ahead);
    else if (args.w.scale_f16) int_columns<Codes8, 32, true, true, false>(args, row, rows, column, columns, tile, ahead);
    else int_columns<Codes8, 32, true, false, false>(args, row, rows, column, columns, tile, ahead);
}

}  // namespace octavo::OCTAVO_ISA
