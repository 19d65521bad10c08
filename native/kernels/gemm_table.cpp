// Linear kernels on codes of a table: 4-bit codes into 16 integers (int8 activations) or 16 floats (bf16 activations), and 8-bit
// floats (bf16 activations). Sums of a group, then their scale, in group order.
#include "gemm.h"

namespace octavo::OCTAVO_ISA {
namespace {

// Where the codes and scales of NV vectors of columns begin; `bytes` of a column in a panel row, `scale` bytes of a scale.
template <int NV>
struct Columns {
    const uint8_t* codes[NV];
    const uint8_t* scales[NV];
    OCTAVO_INLINE Columns(const WeightView& w, int64_t column, int bytes, int scale) {
        for (int j = 0; j < NV; ++j) {
            const int64_t c = column + j * L;
            codes[j] = w.data + c / kPanel * w.panel_bytes + c % kPanel * bytes;
            scales[j] = (const uint8_t*)w.scales + (c / kPanel * w.groups * kPanel + c % kPanel) * scale;
        }
    }
};

template <bool F16>
OCTAVO_INLINE vf take_scale(const uint8_t*& at) {
    const vf scale = F16 ? load_f16(at) : load<vf>(at);
    at += kPanel * (F16 ? 2 : 4);
    return scale;
}

// Tiles of 4-bit codes of integers; `U` is the k of one activation group.
template <int U, bool F16, int MR, int NV>
void lut4_tiles(const LinearArgs& args, int64_t row, int tiles, int64_t column, float* tile, Ahead& ahead) {
    const int64_t row_bytes = args.a.width, groups = row_bytes / U, per_scale = args.w.group / U;
    const ByteTable table(args.w.table_bytes);
    const Columns<NV> first(args.w, column, 4, F16 ? 2 : 4);
    for (int t = 0; t < tiles; ++t, row += MR, tile += MR * kColumnTile) {
        if (!ahead.few()) ahead.fetch();
        Columns<NV> w = first;
        const uint8_t* a = args.a.data + row * row_bytes;
        const float* a_scales = args.a.scales + row * groups;
        const int32_t* a_sums = args.a.sums + row * groups;
        vf out[MR][NV] = {};
        for (int64_t g = 0; g < groups;) {
            vf scale[NV];
            for (int j = 0; j < NV; ++j) scale[j] = take_scale<F16>(w.scales[j]);
            for (const int64_t end = g + per_scale < groups ? g + per_scale : groups; g < end; ++g, a += U) {
                if (ahead.few()) ahead.fetch();
                vi acc[MR][NV];
                for (int i = 0; i < MR; ++i)
                    for (int j = 0; j < NV; ++j) acc[i][j] = splat(a_sums[i * groups + g] * (kDotBias - 128));
#pragma GCC unroll 4
                for (int s = 0; s < U; s += 8) {
                    vu low[NV], high[NV];
#pragma GCC unroll 4
                    for (int j = 0; j < NV; ++j) {
                        const vu both = load<vu>(w.codes[j]);
                        w.codes[j] += kPanelRowBytes;
                        low[j] = table.at(both & 0x0f0f0f0fu);
                        high[j] = table.at((both >> 4) & 0x0f0f0f0fu);
                    }
#pragma GCC unroll 8
                    for (int i = 0; i < MR; ++i) {
                        const vu one = splat(load_u32(a + i * row_bytes + s)), two = splat(load_u32(a + i * row_bytes + s + 4));
#pragma GCC unroll 4
                        for (int j = 0; j < NV; ++j) acc[i][j] = dot4(dot4(acc[i][j], low[j], one), high[j], two);
                    }
                }
                for (int i = 0; i < MR; ++i)
                    for (int j = 0; j < NV; ++j)
                        out[i][j] = fma(to_float(acc[i][j]) * scale[j], splat(a_scales[i * groups + g]), out[i][j]);
            }
        }
        for (int i = 0; i < MR; ++i)
            for (int j = 0; j < NV; ++j) store(tile + i * kColumnTile + j * L, out[i][j]);
    }
}

// Eight k of 4-bit codes of floats: float weights times bf16 activations widened, each product and sum one fma.
struct Floats4 {
    static constexpr int kColumnBytes = 4, kRows = 1;
    static constexpr float kFactor = 1.0f;
    FloatTable table;
    explicit OCTAVO_INLINE Floats4(const WeightView& w) : table(w.table) {}
    template <int MR, int NV>
    OCTAVO_INLINE void eight(vf (&acc)[MR][NV], const uint8_t* a, int64_t row_bytes, const uint8_t* const (&codes)[NV]) const {
        vu w[NV];
        for (int j = 0; j < NV; ++j) w[j] = load<vu>(codes[j]);
#pragma GCC unroll 4
        for (int pair = 0; pair < 4; ++pair) {
            const int shift = pair % 2 * 16 + pair / 2 * 4;
            vf even[NV], odd[NV];
#pragma GCC unroll 4
            for (int j = 0; j < NV; ++j) {
                even[j] = table.at(w[j] >> shift);
                odd[j] = table.at(w[j] >> (shift + 8));
            }
#pragma GCC unroll 8
            for (int i = 0; i < MR; ++i) {
                const vu av = splat(load_u32(a + i * row_bytes + pair * 4));
#pragma GCC unroll 4
                for (int j = 0; j < NV; ++j) acc[i][j] = fma(odd[j], bf16_odd(av), fma(even[j], bf16_even(av), acc[i][j]));
            }
        }
    }
};

// Eight k of 8-bit floats, 16 columns of one k after another: widened, exact in bf16.
template <bool E5M2>
struct Floats8 {
    static constexpr int kColumnBytes = 1, kRows = 2;
    static constexpr float kFactor = E5M2 ? 1.0f : 256.0f;
    explicit OCTAVO_INLINE Floats8(const WeightView&) {}
    template <int MR, int NV>
    OCTAVO_INLINE void eight(vf (&acc)[MR][NV], const uint8_t* a, int64_t row_bytes, const uint8_t* const (&codes)[NV]) const {
#pragma GCC unroll 4
        for (int pair = 0; pair < 4; ++pair) {
            vf even[NV], odd[NV];
#pragma GCC unroll 4
            for (int j = 0; j < NV; ++j) {
                even[j] = load_f8<E5M2>(codes[j] + 2 * pair * kPanel);
                odd[j] = load_f8<E5M2>(codes[j] + (2 * pair + 1) * kPanel);
            }
#pragma GCC unroll 8
            for (int i = 0; i < MR; ++i) {
                const vu av = splat(load_u32(a + i * row_bytes + pair * 4));
#pragma GCC unroll 4
                for (int j = 0; j < NV; ++j) acc[i][j] = dot2_floats(acc[i][j], even[j], odd[j], av);
            }
        }
    }
};

template <class Codes, bool F16, int MR, int NV>
void float_tiles(const LinearArgs& args, int64_t row, int tiles, int64_t column, float* tile, Ahead& ahead) {
    const int64_t row_bytes = args.a.row_bytes(), k = args.w.k_padded, group = args.w.group;
    const Codes codes(args.w);
    const Columns<NV> first(args.w, column, Codes::kColumnBytes, F16 ? 2 : 4);
    for (int t = 0; t < tiles; ++t, row += MR, tile += MR * kColumnTile) {
        if (!ahead.few()) ahead.fetch();
        Columns<NV> w = first;
        const uint8_t* a = args.a.data + row * row_bytes;
        vf out[MR][NV] = {};
        for (int64_t begin = 0; begin < k; begin += group) {
            vf scale[NV];
            for (int j = 0; j < NV; ++j) scale[j] = take_scale<F16>(w.scales[j]) * splat(Codes::kFactor);
            vf acc[MR][NV] = {};
            const int64_t end = begin + group < k ? begin + group : k;
            for (int64_t at = begin; at < end; at += 8, a += 16) {
                if (ahead.few() && at % kKPad == 0) ahead.fetch();
                codes.eight(acc, a, row_bytes, w.codes);
                for (int j = 0; j < NV; ++j) w.codes[j] += Codes::kRows * kPanelRowBytes;
            }
            for (int i = 0; i < MR; ++i)
                for (int j = 0; j < NV; ++j) out[i][j] = fma(acc[i][j], scale[j], out[i][j]);
        }
        for (int i = 0; i < MR; ++i)
            for (int j = 0; j < NV; ++j) store(tile + i * kColumnTile + j * L, out[i][j]);
    }
}

template <class Codes, bool F16>
void float_block(const LinearArgs& args, int64_t row, int rows, int64_t column, int columns, float* tile, Ahead& ahead) {
    for (int c = 0; c < columns; c += kIntVectors * L)
        for_tile_runs<kIntRows>(rows, [&](auto mr, int done, int tiles) {
            float_tiles<Codes, F16, mr, kIntVectors>(args, row + done, tiles, column + c, tile + done * kColumnTile + c, ahead);
        });
}

template <class Codes>
void float_block(const LinearArgs& args, int64_t row, int rows, int64_t column, int columns, float* tile, Ahead& ahead) {
    if (args.w.scale_f16) float_block<Codes, true>(args, row, rows, column, columns, tile, ahead);
    else float_block<Codes, false>(args, row, rows, column, columns, tile, ahead);
}

template <int U, bool F16>
void lut4_block(const LinearArgs& args, int64_t row, int rows, int64_t column, int columns, float* tile, Ahead& ahead) {
    for (int c = 0; c < columns; c += kIntVectors * L)
        for_tile_runs<kIntRows>(rows, [&](auto mr, int done, int tiles) {
            lut4_tiles<U, F16, mr, kIntVectors>(args, row + done, tiles, column + c, tile + done * kColumnTile + c, ahead);
        });
}

}  // namespace

void gemm_lut4(const LinearArgs& args, int64_t row, int rows, int64_t column, int columns, float* tile, Ahead& ahead) {
    const bool f16 = args.w.scale_f16;
    if (args.a.group == 16 && f16) lut4_block<16, true>(args, row, rows, column, columns, tile, ahead);
    else if (args.a.group == 16) lut4_block<16, false>(args, row, rows, column, columns, tile, ahead);
    else if (f16) lut4_block<32, true>(args, row, rows, column, columns, tile, ahead);
    else lut4_block<32, false>(args, row, rows, column, columns, tile, ahead);
}
void gemm_lut4f(const LinearArgs& args, int64_t row, int rows, int64_t column, int columns, float* tile, Ahead& ahead) {
    float_block<Floats4>(args, row, rows, column, columns, tile, ahead);
}
void gemm_f8(const LinearArgs& args, int64_t row, int rows, int64_t column, int columns, float* tile, Ahead& ahead) {
    if (args.w.form == Form::E5M2) float_block<Floats8<true>>(args, row, rows, column, columns, tile, ahead);
    else float_block<Floats8<false>>(args, row, rows, column, columns, tile, ahead);
}

}  // namespace octavo::OCTAVO_ISA
