// The register-tile kernels behind a linear: a block of rows times a block of packed columns into a float tile.
// Every output element is summed over the whole k in one order whatever the tile shape, so results do not depend on it.
#pragma once
#include <type_traits>

#include "simd.h"

namespace octavo::OCTAVO_ISA {

// Brings the weights of the columns that come next into L2, a few cache lines at a time while a tile is computed. They are in no
// cache, and the processor's own prefetching ends at every page.
class Ahead {
  public:
    // `columns` columns from `column` on, in `steps` calls of fetch(). `few`: it is called for every group, not for every tile.
    Ahead(const WeightView& w, int64_t column, int64_t columns, int64_t steps, bool few) : few_(few) {
        if (columns <= 0) return;
        const int64_t panels = columns / kPanel, first = column / kPanel;
        const int64_t scale_bytes = w.groups * kPanel * (w.scale_f16 ? 2 : 4);
        int64_t lines = 0;
        auto add = [&](const void* data, int64_t panel_bytes) {
            if (!data) return;
            lines += panels * panel_bytes / kLine + 1;
            waiting_[count_++] = {(const uint8_t*)data + first * panel_bytes, (const uint8_t*)data + (first + panels) * panel_bytes};
        };
        add(w.minimums, scale_bytes);
        add(w.scales, scale_bytes);
        add(w.data, w.panel_bytes);
        lines_ = (int)(lines / steps + 1);
        now_ = waiting_[--count_];
    }
    OCTAVO_INLINE void fetch() {
        for (int line = 0; line < lines_; ++line, now_.at += kLine) {
            if (now_.at >= now_.end) {
                if (count_ == 0) return;
                now_ = waiting_[--count_];
            }
            __builtin_prefetch(now_.at, 0, 2);
        }
    }

    bool few() const { return few_; }

  private:
    static constexpr int64_t kLine = 64;
    struct Range {
        const uint8_t *at = nullptr, *end = nullptr;
    };
    Range now_, waiting_[3];
    int count_ = 0, lines_ = 0;
    bool few_;
};

// Rows [row, row + rows) times packed columns [column, column + columns) into tile[rows][kColumnTile]; columns is 32 or 64.
// In the form of the weight: the kernels that follow.
void gemm(const LinearArgs& args, int64_t row, int rows, int64_t column, int columns, float* tile, Ahead& ahead);
void gemm_f32(const LinearArgs& args, int64_t row, int rows, int64_t column, int columns, float* tile, Ahead& ahead);
void gemm_bf16(const LinearArgs& args, int64_t row, int rows, int64_t column, int columns, float* tile, Ahead& ahead);
void gemm_w8(const LinearArgs& args, int64_t row, int rows, int64_t column, int columns, float* tile, Ahead& ahead);
void gemm_w4(const LinearArgs& args, int64_t row, int rows, int64_t column, int columns, float* tile, Ahead& ahead);
void gemm_lut4(const LinearArgs& args, int64_t row, int rows, int64_t column, int columns, float* tile, Ahead& ahead);
void gemm_lut4f(const LinearArgs& args, int64_t row, int rows, int64_t column, int columns, float* tile, Ahead& ahead);
void gemm_f8(const LinearArgs& args, int64_t row, int rows, int64_t column, int columns, float* tile, Ahead& ahead);

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
// Units of k (4 bytes) of a float tile between two fetches ahead.
constexpr int64_t kFloatUnits = 32;

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

// Calls body(integral constant MR, rows done, tiles) for as many tiles of `Max` rows as there are, then for one of what is left.
template <int Max, class Body>
OCTAVO_INLINE void for_tile_runs(int rows, Body&& body) {
    const int tiles = rows / Max, done = tiles * Max;
    if (tiles > 0) body(std::integral_constant<int, Max>{}, 0, tiles);
    auto step = [&](auto mr) { body(mr, done, 1); };
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

// Calls body(integral constant MR, rows done) for each of these tiles.
template <int Max, class Body>
OCTAVO_INLINE void for_row_tiles(int rows, Body&& body) {
    for_tile_runs<Max>(rows, [&](auto mr, int done, int tiles) {
        for (int t = 0; t < tiles; ++t) body(mr, done + t * decltype(mr)::value);
    });
}

}  // namespace octavo::OCTAVO_ISA
