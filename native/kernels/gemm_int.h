// The register tile shared by the int8 and int4 linears: exact integer dot products per group of k, scaled in group order.
#pragma once
#include "gemm.h"

namespace octavo::OCTAVO_ISA {

// The integer sums of a tile. A single accumulator would wait for its own latency: it is split in four by step of k, which
// integer addition does not notice.
template <int MR, int NV>
struct SplitSums {
    static constexpr int kParts = MR * NV == 1 ? 4 : 1;
    vi (&acc)[MR][NV];
    vi parts[kParts][MR][NV] = {};
    explicit OCTAVO_INLINE SplitSums(vi (&sums)[MR][NV]) : acc(sums) {}
    OCTAVO_INLINE vi& at(int step, int i, int j) {
        if constexpr (kParts == 1) return acc[i][j];
        else return parts[step % kParts][i][j];
    }
    OCTAVO_INLINE void join() {
        if constexpr (kParts > 1) acc[0][0] += (parts[0][0][0] + parts[1][0][0]) + (parts[2][0][0] + parts[3][0][0]);
    }
};

// `U` is the k of one activation group, or of a part of it where the groups are wide; a weight scale covers one group or several.
// out += scale_a * (scale_w * (acc - zero * sum_a)) + minimum_w * (scale_a * sum_a), one fma each, in group order.
template <class Codes, int U, bool Wide, bool F16, bool Min, int MR, int NV>
void int_tiles(const LinearArgs& args, int64_t row, int tiles, int64_t column, float* tile, Ahead& ahead) {
    const int group = Wide ? args.a.group : U;
    const int64_t row_bytes = args.a.width, groups = row_bytes / group;
    const int64_t per_scale = args.w.group / group;
    const int correction = Codes::kBias - args.w.zero;
    constexpr int kScaleBytes = F16 ? 2 : 4;
    const uint8_t* codes[NV];
    const uint8_t* first_scales[NV];
    const uint8_t* first_minimums[NV];
    for (int j = 0; j < NV; ++j) {
        const int64_t c = column + j * L;
        codes[j] = args.w.data + c / kPanel * args.w.panel_bytes + c % kPanel * 4;
        const int64_t offset = (c / kPanel * args.w.groups * kPanel + c % kPanel) * kScaleBytes;
        first_scales[j] = (const uint8_t*)args.w.scales + offset;
        first_minimums[j] = Min ? (const uint8_t*)args.w.minimums + offset : nullptr;
    }
    const uint8_t* a = args.a.data + row * row_bytes;
    const float* a_scales = args.a.scales + row * groups;
    const float* a_scaled_sums = args.a.scaled_sums + row * groups;
    const int32_t* a_sums = args.a.sums + row * groups;
    // A single row reads the weights as one stream, and how far ahead of it is best depends on the form.
    constexpr bool kStream = MR * NV == 1;
    constexpr int kScalesAhead = Codes::kAhead / kPanelRowBytes / (U / 8) * kPanel * kScaleBytes;
    const bool few = !kStream && ahead.few();
    for (int t = 0; t < tiles; ++t) {
        if (!few) ahead.fetch();
        const uint8_t* w[NV];
        const uint8_t* scales[NV];
        const uint8_t* minimums[NV];
        for (int j = 0; j < NV; ++j) w[j] = codes[j], scales[j] = first_scales[j], minimums[j] = first_minimums[j];
        vf out[MR][NV] = {};
        for (int64_t g = 0; g < groups;) {
            vf scale[NV], minimum[NV];
#pragma GCC unroll 8
            for (int j = 0; j < NV; ++j) {
                scale[j] = F16 ? load_f16(scales[j]) : load<vf>(scales[j]);
                if constexpr (kStream && Codes::kAhead > 0) __builtin_prefetch(scales[j] + kScalesAhead, 0, 2);
                scales[j] += kPanel * kScaleBytes;
                if constexpr (Min) {
                    minimum[j] = F16 ? load_f16(minimums[j]) : load<vf>(minimums[j]);
                    if constexpr (kStream && Codes::kAhead > 0) __builtin_prefetch(minimums[j] + kScalesAhead, 0, 2);
                    minimums[j] += kPanel * kScaleBytes;
                }
            }
            const int64_t end = g + per_scale < groups ? g + per_scale : groups;
            for (; g < end; ++g) {
                if (few) ahead.fetch();
                vi acc[MR][NV];
#pragma GCC unroll 8
                for (int i = 0; i < MR; ++i) {
                    vi start = splat(a_sums[i * groups + g] * correction);
#pragma GCC unroll 8
                    for (int j = 0; j < NV; ++j) acc[i][j] = start;
                }
                const uint8_t* from = a + g * group;
                if constexpr (Wide)
                    for (const uint8_t* last = from + group - U; from < last; from += U) Codes::template dot<U, MR, NV>(acc, from, row_bytes, w);
                Codes::template dot<U, MR, NV>(acc, from, row_bytes, w);
#pragma GCC unroll 8
                for (int i = 0; i < MR; ++i) {
                    vf sa = splat(a_scales[i * groups + g]);
#pragma GCC unroll 8
                    for (int j = 0; j < NV; ++j) {
                        out[i][j] = fma(to_float(acc[i][j]) * scale[j], sa, out[i][j]);
                        if constexpr (Min) out[i][j] = fma(minimum[j], splat(a_scaled_sums[i * groups + g]), out[i][j]);
                    }
                }
            }
        }
        for (int i = 0; i < MR; ++i)
            for (int j = 0; j < NV; ++j) store(tile + i * kColumnTile + j * L, out[i][j]);
        tile += MR * kColumnTile;
        a += MR * row_bytes;
        a_scales += MR * groups;
        a_scaled_sums += MR * groups;
        a_sums += MR * groups;
    }
}

template <class Codes, int U, bool Wide, bool F16, bool Min>
void int_columns(const LinearArgs& args, int64_t row, int rows, int64_t column, int columns, float* tile, Ahead& ahead) {
    if (rows == 1) {
        // One row is bound by memory: one panel after another, so that codes are a single stream.
        for (int c = 0; c < columns; c += L) int_tiles<Codes, U, Wide, F16, Min, 1, 1>(args, row, 1, column + c, tile + c, ahead);
        return;
    }
    for (int c = 0; c < columns; c += kIntVectors * L)
        for_tile_runs<kIntRows>(rows, [&](auto mr, int done, int tiles) {
            int_tiles<Codes, U, Wide, F16, Min, mr, kIntVectors>(args, row + done, tiles, column + c, tile + done * kColumnTile + c, ahead);
        });
}

template <class Codes, int U>
void int_units(const LinearArgs& args, int64_t row, int rows, int64_t column, int columns, float* tile, Ahead& ahead) {
    const bool f16 = args.w.scale_f16, min = args.w.minimums != nullptr;
    if (f16 && min) int_columns<Codes, U, false, true, true>(args, row, rows, column, columns, tile, ahead);
    else if (f16) int_columns<Codes, U, false, true, false>(args, row, rows, column, columns, tile, ahead);
    else if (min) int_columns<Codes, U, false, false, true>(args, row, rows, column, columns, tile, ahead);
    else int_columns<Codes, U, false, false, false>(args, row, rows, column, columns, tile, ahead);
}

template <class Codes>
void int_block(const LinearArgs& args, int64_t row, int rows, int64_t column, int columns, float* tile, Ahead& ahead) {
    if (args.a.group == 16) int_units<Codes, 16>(args, row, rows, column, columns, tile, ahead);
    else int_units<Codes, 32>(args, row, rows, column, columns, tile, ahead);
}

}  // namespace octavo::OCTAVO_ISA
