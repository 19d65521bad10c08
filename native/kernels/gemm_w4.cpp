// Linear kernel on int4 panels [columns/16][k/8][16][4]: low nibbles hold k..k+3, high nibbles k+4..k+7.
#include "gemm_int.h"

namespace octavo::OCTAVO_ISA {
namespace {

struct Codes4 {
    static constexpr int kBias = 0;  // dot4_nibble takes the codes as they are on every instruction set
    static constexpr int kAhead = 8192;  // measured, as that w8 is better left to the processor
    template <int U, int MR, int NV>
    static OCTAVO_INLINE void dot(vi (&acc)[MR][NV], const uint8_t* a, int64_t row_bytes, const uint8_t* (&w)[NV]) {
        SplitSums<MR, NV> sums(acc);
#pragma GCC unroll 8
        for (int s = 0; s < U / 8; ++s) {
            vu low[NV], high[NV];
#pragma GCC unroll 8
            for (int j = 0; j < NV; ++j) {
                vu both = load<vu>(w[j]);
                if constexpr (MR * NV == 1) __builtin_prefetch(w[j] + kAhead, 0, 2);
                w[j] += kPanelRowBytes;
                low[j] = both & 0x0f0f0f0fu;
                high[j] = (both >> 4) & 0x0f0f0f0fu;
            }
#pragma GCC unroll 8
            for (int i = 0; i < MR; ++i) {
                vu av = splat(load_u32(a + i * row_bytes + s * 8));
#pragma GCC unroll 8
                for (int j = 0; j < NV; ++j) sums.at(2 * s, i, j) = dot4_nibble(sums.at(2 * s, i, j), low[j], av);
                av = splat(load_u32(a + i * row_bytes + s * 8 + 4));
#pragma GCC unroll 8
                for (int j = 0; j < NV; ++j) sums.at(2 * s + 1, i, j) = dot4_nibble(sums.at(2 * s + 1, i, j), high[j], av);
            }
        }
        sums.join();
    }
};

}  // namespace

void gemm_w4(const LinearArgs& args, int64_t row, int rows, int64_t column, int columns, float* tile, Ahead& ahead) {
    int_block<Codes4>(args, row, rows, column, columns, tile, ahead);
}

}  // namespace octavo::OCTAVO_ISA
