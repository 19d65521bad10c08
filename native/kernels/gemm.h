// The register-tile kernels behind a linear: a block of rows times a block of packed columns into a float tile.
// Every output element is summed over the whole k in one order whatever the tile shape, so results do not depend on it.
#pragma once
#include <type_traits>

#include "simd.h"

namespace octavo::OCTAVO_ISA {

// Rows [row, row + rows) times packed columns [column, column + columns) into tile[rows][kColumnTile]; columns is 32 or 64.
void gemm_f32(const LinearArgs& args, int64_t row, int rows, int64_t column, int columns, float* tile);
void gemm_bf16(const LinearArgs& args, int64_t row, int rows, int64_t column, int columns, float* tile);
void gemm_w8(const LinearArgs& args, int64_t row, int rows, int64_t column, int columns, float* tile);
void gemm_w4(const LinearArgs& args, int64_t row, int rows, int64_t column, int columns, float* tile);

// Four bytes of k of every lane, multiplied with the same four bytes of a row of activations.
struct DotBf16 {
    static OCTAVO_INLINE vf run(vf acc, vu w, vu a) { return dot2_bf16(acc, w, a); }
    static constexpr int kPerUnit = 2;
};
struct DotF32 {
    static OCTAVO_INLINE vf run(vf acc, vu w, vu a) { return fma((vf)w, (vf)a, acc); }
    static constexpr int kPerUnit = 1;
};

#if defined(__AVX512F__)
constexpr int kFloatRows = 6, kFloatVectors = 4;
constexpr int kIntRows = 6, kIntVectors = 2;
#elif defined(__AVX2__)
constexpr int kFloatRows = 4, kFloatVectors = 2;
constexpr int kIntRows = 2, kIntVectors = 2;
#elif defined(__aarch64__)
constexpr int kFloatRows = 4, kFloatVectors = 4;
constexpr int kIntRows = 2, kIntVectors = 4;
#else
constexpr int kFloatRows = 4, kFloatVectors = 2;
constexpr int kIntRows = 2, kIntVectors = 2;
#endif

// acc[i][j] += dot over `units` of row pointer a[i] and column vector pointer w[j] (rows of 64 bytes).
template <class Dot, int MR, int NV>
OCTAVO_INLINE void dot_tile(vf (&acc)[MR][NV], const uint8_t* const (&a)[MR], const uint8_t* const (&w)[NV], int64_t units) {
    for (int64_t u = 0; u < units; ++u) {
        vu wv[NV];
#pragma GCC unroll 8
        for (int j = 0; j < NV; ++j) wv[j] = load<vu>(w[j] + u * kPanelRowBytes);
#pragma GCC unroll 8
        for (int i = 0; i < MR; ++i) {
            vu av = splat(load_u32(a[i] + u * 4));
#pragma GCC unroll 8
            for (int j = 0; j < NV; ++j) acc[i][j] = Dot::run(acc[i][j], wv[j], av);
        }
    }
}

// Calls body(integral constant MR) for the largest tile height up to `Max` that fits, until `rows` are done.
template <int Max, class Body>
OCTAVO_INLINE void for_row_tiles(int rows, Body&& body) {
    int done = 0;
    auto step = [&](auto mr) {
        body(mr, done);
        done += decltype(mr)::value;
    };
    while (rows - done >= Max) step(std::integral_constant<int, Max>{});
    switch (rows - done) {
        case 7: if constexpr (Max > 7) step(std::integral_constant<int, 7>{}); break;
        case 6: if constexpr (Max > 6) step(std::integral_constant<int, 6>{}); break;
        case 5: if constexpr (Max > 5) step(std::integral_constant<int, 5>{}); break;
        case 4: if constexpr (Max > 4) step(std::integral_constant<int, 4>{}); break;
        case 3: if constexpr (Max > 3) step(std::integral_constant<int, 3>{}); break;
        case 2: if constexpr (Max > 2) step(std::integral_constant<int, 2>{}); break;
        case 1: if constexpr (Max > 1) step(std::integral_constant<int, 1>{}); break;
        default: break;
    }
}

}  // namespace octavo::OCTAVO_ISA
