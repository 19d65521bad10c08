// Multi-head latent attention: linears of each head, and what is rotated, normed and appended to the cache for a token.
#include "experts.h"
#include "kernels.h"

namespace octavo::OCTAVO_ISA {
namespace {

int64_t element_bytes(Act form) { return form == Act::F32 ? 4 : form == Act::BF16 ? 2 : 1; }

// x [dim] rotated by the angles of a position into out: halves, whichever way the pairs lie in x.
void rotate(const float* x, int dim, const float* cos, const float* sin, bool interleaved, float* out) {
    const int half = dim / 2, next = interleaved ? 2 : 1, other = interleaved ? 1 : half;
    for (int i = 0; i < half; ++i) {
        const float a = x[i * next], b = x[i * next + other];
        out[i] = a * cos[i] - b * sin[i];
        out[half + i] = b * cos[i] + a * sin[i];
    }
}

void norm(const float* x, int width, const float* weight, float eps, float* out) {
    vf squares = {};
    for (int c = 0; c < width; c += L) squares = fma(load<vf>(x + c), load<vf>(x + c), squares);
    const vf r = splat(1.0f / __builtin_sqrtf(sum_lanes(squares) / (float)width + eps));
    for (int c = 0; c < width; c += L) store(out + c, load<vf>(x + c) * r * load<vf>(weight + c));
}

}  // namespace

void head_linear_tile(const HeadLinearArgs& args, int64_t index) {
    const int64_t head = index % args.heads, row = index / args.heads * args.row_tile;
    LinearArgs linear;
    linear.w = args.w[head];
    linear.rows = linear.row_tile = (int)(args.rows - row < args.row_tile ? args.rows - row : args.row_tile);
    linear.a = args.in;
    linear.a.data += row * args.in.row_bytes() + (args.in_first + head * args.in_step) * element_bytes(args.in.form);
    const int64_t column = args.out_first + head * args.out_step;
    linear.out = args.out;
    linear.out.data += row * args.out.row_bytes() + column * element_bytes(args.out.form);
    if (args.out.form == Act::I8) {
        const int64_t group = row * args.out.groups() + column / args.out.group;
        linear.out.scales += group;
        linear.out.scaled_sums += group;
        linear.out.sums += group;
    }
    linear.out_columns = args.columns;
    linear.column_tile = (int)linear.w.columns;
    linear.row_tiles = linear.column_tiles = 1;
    linear_tile(linear, 0);
}

void latent_row(const LatentArgs& args, const RopeArgs& append, int64_t row) {
    const int dim = append.head_dim, half = args.rope_dim / 2;
    const float* cos = append.cos + append.positions[row] * half;
    const float* sin = append.sin + append.positions[row] * half;
    const float* kv = args.kv + row * args.kv_stride + args.kv_first;
    alignas(64) float staged[3 * kMaxHeadDim];
    alignas(64) uint8_t unused[kMaxHeadDim * 4];
    __builtin_memset(staged, 0, (size_t)dim * 4);
    rotate(kv + args.rank, args.rope_dim, cos, sin, args.interleaved, staged + dim);
    norm(kv, args.rank, args.norm, args.norm_eps, staged + dim + args.rope_dim);
    __builtin_memcpy(staged + 2 * dim, staged + dim, (size_t)dim * 4);
    // One query head that is not used tells whether the cache could hold the token.
    RopeArgs one = append;
    one.qkv = staged;
    one.stride = 0;
    one.q_heads = 1;
    one.rope_dim = 0;
    one.positions += row;
    one.slots += row;
    one.q_out = unused;
    rope_row(one, 0);
    uint32_t first = 0;
    __builtin_memcpy(&first, unused, append.q_form == Act::F32 ? 4 : 2);
    const bool lost = first != 0;
    for (int h = 0; h < args.heads; ++h) {
        float part[kMaxHeadDim];
        rotate(args.q + row * args.q_stride + args.q_first + h * args.q_step, args.rope_dim, cos, sin, args.interleaved, part);
        if (lost) part[0] = __builtin_nanf("");
        const int64_t at = (row * args.heads + h) * dim;
        if (append.q_form == Act::F32) {
            __builtin_memcpy((float*)append.q_out + at, part, (size_t)args.rope_dim * 4);
        } else {
            for (int c = 0; c < args.rope_dim; c += L) store_bf16((uint16_t*)append.q_out + at + c, load<vf>(part + c));
        }
    }
}

}  // namespace octavo::OCTAVO_ISA
