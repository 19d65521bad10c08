// One tile of a linear: the register kernels into a float tile in L1, then the epilogue (bias, residual, activation, quantisation).
#include "gemm.h"
#include "kernels.h"

namespace octavo::OCTAVO_ISA {
namespace {

constexpr int kMaxRows = kMaxRowTile;

OCTAVO_INLINE vf activate(Epilogue kind, vf x) {
    switch (kind) {
        case Epilogue::SiluMul: case Epilogue::Silu: return vsilu(x);
        case Epilogue::GeluMul: case Epilogue::Gelu: return vgelu(x);
        default: return vgelu_tanh(x);
    }
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

}  // namespace

void linear_tile(const LinearArgs& args, int64_t tile_index) {
    // Tiles claimed one after the other, usually by different threads, never write into one cache line: rows go fastest, then
    // one region of columns per thread, in which each thread also finds its weights in one sequence.
    const int64_t row_index = tile_index % args.row_tiles, place = tile_index / args.row_tiles;
    const int64_t region = place % args.streams, longer = args.column_tiles % args.streams;
    const int64_t column_index =
        region * (args.column_tiles / args.streams) + (region < longer ? region : longer) + place / args.streams;
    const int64_t row_begin = row_index * args.row_tile;
    const int rows = (int)(args.rows - row_begin < args.row_tile ? args.rows - row_begin : args.row_tile);
    alignas(64) float tile[kMaxRows * kColumnTile];
    const int64_t column_begin = column_index * args.column_tile;
    const int64_t column_end =
        column_begin + args.column_tile < args.w.columns ? column_begin + args.column_tile : args.w.columns;
    for (int64_t column = column_begin; column < column_end; column += kColumnTile) {
        const int columns = (int)(column_end - column < kColumnTile ? column_end - column : kColumnTile);
        switch (args.w.form) {
            case Form::F32: gemm_f32(args, row_begin, rows, column, columns, tile); break;
            case Form::BF16: gemm_bf16(args, row_begin, rows, column, columns, tile); break;
            case Form::W8: gemm_w8(args, row_begin, rows, column, columns, tile); break;
            case Form::W4: gemm_w4(args, row_begin, rows, column, columns, tile); break;
        }
        if (args.bias)
            for (int r = 0; r < rows; ++r)
                for (int c = 0; c < columns; c += L) {
                    float* p = tile + r * kColumnTile + c;
                    store(p, load<vf>(p) + load<vf>(args.bias + column + c));
                }
        int width = columns;
        switch (args.epilogue) {
            case Epilogue::Store:
                break;
            case Epilogue::Add:
                store_f32(args, row_begin, rows, column, columns, tile, true);
                continue;
            case Epilogue::SiluMul: case Epilogue::GeluMul: case Epilogue::GeluTanhMul:
                // Packed columns alternate: 16 of gate, 16 of up.
                for (int r = 0; r < rows; ++r)
                    for (int c = 0; c < columns; c += 2 * kPanel)
                        for (int v = 0; v < kPanel; v += L) {
                            const float* p = tile + r * kColumnTile + c + v;
                            vf y = activate(args.epilogue, load<vf>(p)) * load<vf>(p + kPanel);
                            store(tile + r * kColumnTile + c / 2 + v, y);
                        }
                width = columns / 2;
                break;
            default:
                for (int r = 0; r < rows; ++r)
                    for (int c = 0; c < columns; c += L) {
                        float* p = tile + r * kColumnTile + c;
                        store(p, activate(args.epilogue, load<vf>(p)));
                    }
        }
        const int64_t out_column = width == columns ? column : column / 2;
        if (args.out.form == Act::F32) {
            store_f32(args, row_begin, rows, out_column, width, tile, false);
            continue;
        }
        const int64_t room = args.out.width - out_column;
        const int kept = (int)(room < width ? room : width);
        for (int r = 0; r < rows; ++r) store_activation(args.out, row_begin + r, out_column, kept, tile + r * kColumnTile);
    }
}

}  // namespace octavo::OCTAVO_ISA
