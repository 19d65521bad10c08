// One tile of a linear: the register kernels into a float tile in L1, then the epilogue (bias, residual, activation, quantisation).
#include "gemm.h"
#include "kernels.h"

namespace octavo::OCTAVO_ISA {
namespace {

constexpr int kMaxRows = kMaxRowTile;
constexpr int kFewRows = 16;

// Calls body(activation function) for the kind of an epilogue: asked of every vector, the choice cost as much as an activation.
template <class Body>
OCTAVO_INLINE void with_activation(Epilogue kind, Body&& body) {
    switch (kind) {
        case Epilogue::SiluMul: case Epilogue::Silu: body([](vf x) { return vsilu(x); }); break;
        case Epilogue::GeluMul: case Epilogue::Gelu: body([](vf x) { return vgelu(x); }); break;
        case Epilogue::Relu: body([](vf x) { return vrelu(x); }); break;
        case Epilogue::Relu2: body([](vf x) { return vrelu(x) * vrelu(x); }); break;
        default: body([](vf x) { return vgelu_tanh(x); });
    }
}

// Bounds in this order let a NaN pass.
OCTAVO_INLINE vf clamped_silu_mul(vf gate, vf up, vf alpha, vf limit) {
    const vf g = vmin(limit, gate), u = vmax(-limit, vmin(limit, up));
    return vsilu(g * alpha) / alpha * (u + splat(1.0f));
}

void store_f32(const LinearArgs& args, int64_t row, int rows, int64_t column, int columns, const float* tile, bool add) {
    float* out = (float*)args.out.data;
    const int64_t width = args.out_columns - column < columns ? args.out_columns - column : columns;
    for (int r = 0; r < rows; ++r) {
        float* to = out + (row + r) * args.out.width + column;
        const float* from = tile + r * kColumnTile;
        int64_t c = 0;
        for (; c + L <= width; c += L) {
            vf v = load<vf>(from + c);
            store(to + c, add ? load<vf>(to + c) + v : v);
        }
        for (; c < width; ++c) to[c] = add ? to[c] + from[c] : from[c];
    }
}

// What the kernel of a tile fetches meanwhile. Kernels that do little else than read weights are better without (measured).
Ahead ahead_of(const LinearArgs& args, int rows, int64_t column, int columns) {
    const bool floats = args.w.form == Form::F32 || args.w.form == Form::BF16, few = rows <= kFewRows;
    const int64_t next = column + columns, left = rows == 1 || (floats && rows <= kFloatRows) ? 0 : args.w.columns - next;
    const int64_t tiles = ceil_div(rows, floats ? kFloatRows : kIntRows) * ceil_div(columns, (floats ? kFloatVectors : kIntVectors) * L);
    const int64_t pieces = floats ? ceil_div(args.w.panel_bytes, kPanelRowBytes * kFloatUnits) : args.a.groups();
    return {args.w, next, left < kColumnTile ? left : kColumnTile, few ? tiles * pieces : tiles, few};
}

struct TilePlace {
    int64_t row, column;
};

// Where in the output the tile of an index is. Tiles claimed one after the other, usually by different threads, come from
// different regions of the output, one for each thread: they never write into one cache line, and what a thread claims lies side by
// side. A region is a run of row tiles, whose activations stay in L2 while the weights pass by in the order they lie in memory; with
// fewer row tiles than threads it is a run of columns. What does not divide among the threads comes last, in runs of columns.
TilePlace tile_place(const LinearArgs& args, int64_t tile) {
    const int64_t rows = args.row_tiles / args.streams, whole = rows * args.streams * args.column_tiles;
    if (tile < whole) {
        const int64_t region = tile % args.streams, place = tile / args.streams;
        return {region * rows + place / args.column_tiles, place % args.column_tiles};
    }
    const int64_t row = rows * args.streams + (tile - whole) / args.column_tiles, left = (tile - whole) % args.column_tiles;
    const int64_t region = left % args.streams, longer = args.column_tiles % args.streams;
    return {row, region * (args.column_tiles / args.streams) + (region < longer ? region : longer) + left / args.streams};
}

}  // namespace

void gemm(const LinearArgs& args, int64_t row, int rows, int64_t column, int columns, float* tile, Ahead& ahead) {
    switch (args.w.form) {
        case Form::F32: gemm_f32(args, row, rows, column, columns, tile, ahead); break;
        case Form::BF16: gemm_bf16(args, row, rows, column, columns, tile, ahead); break;
        case Form::W8: gemm_w8(args, row, rows, column, columns, tile, ahead); break;
        case Form::W4: gemm_w4(args, row, rows, column, columns, tile, ahead); break;
        case Form::Lut4: gemm_lut4(args, row, rows, column, columns, tile, ahead); break;
        case Form::Lut4F: gemm_lut4f(args, row, rows, column, columns, tile, ahead); break;
        case Form::E4M3: case Form::E5M2: gemm_f8(args, row, rows, column, columns, tile, ahead); break;
    }
}

void linear_tile(const LinearArgs& args, int64_t tile_index) {
    const TilePlace place = tile_place(args, tile_index);
    const int64_t row_begin = place.row * args.row_tile, column_begin = place.column * args.column_tile;
    const int rows = (int)(args.rows - row_begin < args.row_tile ? args.rows - row_begin : args.row_tile);
    alignas(64) float tile[kMaxRows * kColumnTile];
    alignas(64) float wide[kMaxRows * kMaxActGroup];  // a group of each row, as far as it is computed
    const int64_t column_end =
        column_begin + args.column_tile < args.w.columns ? column_begin + args.column_tile : args.w.columns;
    for (int64_t column = column_begin; column < column_end; column += kColumnTile) {
        const int columns = (int)(column_end - column < kColumnTile ? column_end - column : kColumnTile);
        Ahead ahead = ahead_of(args, rows, column, columns);
        gemm(args, row_begin, rows, column, columns, tile, ahead);
        if (args.bias)
            for (int r = 0; r < rows; ++r)
                for (int c = 0; c < columns; c += L) {
                    float* p = tile + r * kColumnTile + c;
                    store(p, load<vf>(p) + load<vf>(args.bias + column + c));
                }
        const bool halves = halves_columns(args.epilogue);
        const int width = halves ? columns / 2 : columns;
        const int64_t out_column = halves ? column / 2 : column;
        // A group wider than a block is quantised when its last block is there.
        const int group = args.out.form == Act::I8 && args.out.group > kKPad ? args.out.group : 0;
        float* to = group ? wide + out_column % group : tile;
        const int stride = group ? group : kColumnTile;
        switch (args.epilogue) {
            case Epilogue::Store:
                if (group)
                    for (int r = 0; r < rows; ++r) __builtin_memcpy(to + r * stride, tile + r * kColumnTile, (size_t)columns * 4);
                break;
            case Epilogue::Add:
                store_f32(args, row_begin, rows, column, columns, tile, true);
                continue;
            case Epilogue::SiluMul: case Epilogue::GeluMul: case Epilogue::GeluTanhMul:
                // Packed columns alternate: 16 of gate, 16 of up.
                with_activation(args.epilogue, [&](auto activation) {
                    for (int r = 0; r < rows; ++r)
                        for (int c = 0; c < columns; c += 2 * kPanel)
                            for (int v = 0; v < kPanel; v += L) {
                                const float* p = tile + r * kColumnTile + c + v;
                                store(to + r * stride + c / 2 + v, activation(load<vf>(p)) * load<vf>(p + kPanel));
                            }
                });
                break;
            case Epilogue::ClampedSiluMul:
                for (int r = 0; r < rows; ++r)
                    for (int c = 0; c < columns; c += 2 * kPanel)
                        for (int v = 0; v < kPanel; v += L) {
                            const float* p = tile + r * kColumnTile + c + v;
                            store(to + r * stride + c / 2 + v, clamped_silu_mul(load<vf>(p), load<vf>(p + kPanel), splat(args.alpha), splat(args.limit)));
                        }
                break;
            default:
                with_activation(args.epilogue, [&](auto activation) {
                    for (int r = 0; r < rows; ++r)
                        for (int c = 0; c < columns; c += L)
                            store(to + r * stride + c, activation(load<vf>(tile + r * kColumnTile + c)));
                });
        }
        if (args.out.form == Act::F32) {
            store_f32(args, row_begin, rows, out_column, width, tile, false);
        } else if (!group) {
            const int64_t room = args.out.width - out_column;
            store_activations(args.out, row_begin, rows, out_column, (int)(room < width ? room : width), tile, kColumnTile);
        } else if ((out_column + width) % group == 0 && out_column < args.out.width) {
            store_activations(args.out, row_begin, rows, out_column + width - group, group, wide, group);
        }
    }
}

}  // namespace octavo::OCTAVO_ISA
