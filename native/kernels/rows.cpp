// Kernels that work on one row at a time: embedding, norms, activation quantisation, rotary embedding with KV append, elementwise.
#include "kernels.h"
#include "kv_panels.h"

namespace octavo::OCTAVO_ISA {
namespace {

constexpr float kSmallest = 1e-36f;  // below it 127 / max|x| overflows; such a group is zeros
constexpr float kRoundNearest = 12582912.0f;  // 1.5 * 2^23: added to a code it leaves the nearest integer in the low bits
constexpr uint32_t kRoundBits = 0x4b400000u;

// int8 codes of one group with scale = max|x| / 127; a NaN in the group makes the scale NaN, so that it is not lost.
void quantize_group(const float* x, int group, int8_t* codes, float* scale, float* scaled_sum, int32_t* sum) {
    vf largest = {};
    vi nan = {};
    for (int c = 0; c < group; c += L) {
        vf v = load<vf>(x + c);
        largest = vmax(vabs(v), largest);
        nan |= (vi)(v != v);
    }
    const float amax = max_lanes(largest);
    const vf inverse = splat(amax > kSmallest ? 127.0f / amax : 0.0f);
    const vf largest_float = splat(3.4028234663852886e38f);
    vi total = {};
    for (int c = 0; c < group; c += L) {
        vf v = load<vf>(x + c);
        vf rounded = v * inverse + splat(kRoundNearest);
        vi code = ((vi)rounded - (int32_t)kRoundBits) & (vi)(vabs(v) <= largest_float);  // 0 for what is not finite: the scale tells
        total += code;
        store_low_bytes(codes + c, (vu)code);
    }
    const int32_t all = (int32_t)sum_lanes((vu)total);
    const float s = any_lane(nan) ? __builtin_nanf("") : amax / 127.0f;
    *scale = s;
    *sum = all;
    *scaled_sum = s * (float)all;
}

// Where a group of values comes from and its codes go, and the index of its scale and sums.
struct GroupPlace {
    const float* from;
    int8_t* codes;
    int64_t index;
};

// As quantize_group, for up to L groups at once: what is found for each of them is one lane of a vector.
template <int Group>
void quantize_groups(const ActView& out, const GroupPlace* places, int count) {
    constexpr int V = Group / L;
    alignas(64) float rotated[L][kKPad];
    const float* from[L];
    vi reduced[L];
    for (int g = 0; g < count; ++g) {
        from[g] = places[g].from;
        if (Group == kKPad && out.rotation != 0) {
            hadamard<kKPad>(from[g], rotated[g]);
            from[g] = rotated[g];
        }
        // The bits of magnitudes are ordered as these are, NaN above all.
        vi largest = (vi)vabs(load<vf>(from[g]));
        for (int v = 1; v < V; ++v) largest = vmax((vi)vabs(load<vf>(from[g] + v * L)), largest);
        reduced[g] = largest;
    }
    for (int g = count; g < L; ++g) reduced[g] = vi{};
    const vi largest = fold_each(reduced, [](vi a, vi b) { return vmax(a, b); });
    const vf inverse = select((vi)((vf)largest > splat(kSmallest)), splat(127.0f) / (vf)largest, vf{});
    alignas(64) float inverses[L];
    store(inverses, inverse);
    for (int g = 0; g < count; ++g) {
        const vf factor = splat(inverses[g]);
        vu total = {};  // unsigned: of what is not finite the code is any number
        for (int v = 0; v < V; ++v) {
            const vu code = (vu)(load<vf>(from[g] + v * L) * factor + splat(kRoundNearest));
            total += code;
            store_low_bytes(places[g].codes + v * L, code);
        }
        reduced[g] = (vi)(total - V * kRoundBits);
    }
    const vi sum = fold_each(reduced, [](vi a, vi b) { return (vi)((vu)a + (vu)b); });
    const vf scale = (vf)largest / splat(127.0f);
    alignas(64) float scales[L], scaled_sums[L];
    alignas(64) int32_t sums[L];
    store(scales, scale);
    store(scaled_sums, scale * to_float(sum));
    store(sums, sum);
    for (int g = 0; g < count; ++g) {
        out.scales[places[g].index] = scales[g];
        out.scaled_sums[places[g].index] = scaled_sums[g];
        out.sums[places[g].index] = sums[g];
    }
    if (!any_lane(largest >= 0x7f800000)) return;
    for (int g = 0; g < count; ++g)  // what is not finite takes more care
        quantize_group(from[g], Group, places[g].codes, out.scales + places[g].index, out.scaled_sums + places[g].index, out.sums + places[g].index);
}

// As quantize_group, for one group of blocks of 64. There are few of these, and each has vectors enough of its own.
void quantize_wide(const ActView& out, const float* values, int8_t* codes, int64_t index) {
    alignas(64) float rotated[kMaxActGroup];
    const float* from = values;
    if (out.rotation != 0) {
        rotate_blocks(values, rotated, out.group, out.rotation);
        from = rotated;
    }
    vi reduced = {};
    for (int c = 0; c < out.group; c += L) reduced = vmax((vi)vabs(load<vf>(from + c)), reduced);
    const int32_t bits = fold_lanes(reduced, [](vi a, vi b) { return vmax(a, b); });
    if (bits >= 0x7f800000) {  // what is not finite takes more care
        quantize_group(from, out.group, codes, out.scales + index, out.scaled_sums + index, out.sums + index);
        return;
    }
    float largest;
    __builtin_memcpy(&largest, &bits, 4);
    const vf factor = splat(largest > kSmallest ? 127.0f / largest : 0.0f);
    vu total = {};
    for (int c = 0; c < out.group; c += L) {
        const vu code = (vu)(load<vf>(from + c) * factor + splat(kRoundNearest));
        total += code;
        store_low_bytes(codes + c, code);
    }
    const int32_t sum = (int32_t)(sum_lanes(total) - (uint32_t)out.group * kRoundBits);
    const float scale = largest / 127.0f;
    out.scales[index] = scale;
    out.scaled_sums[index] = scale * (float)sum;
    out.sums[index] = sum;
}

// Packed element (column, k) as a float, for the embedding.
OCTAVO_INLINE float group_value(const WeightView& w, const void* values, int64_t column, int64_t group) {
    const int64_t index = (column / kPanel * w.groups + group) * kPanel + column % kPanel;
    return w.scale_f16 ? f16_value(((const uint16_t*)values)[index]) : ((const float*)values)[index];
}

OCTAVO_INLINE float inverse_rms(const float* x, int width, float eps) {
    vf squares = {};
    int c = 0;
    for (; c + L <= width; c += L) squares = fma(load<vf>(x + c), load<vf>(x + c), squares);
    float sum = sum_lanes(squares);
    for (; c < width; ++c) sum += x[c] * x[c];
    return 1.0f / __builtin_sqrtf(sum / (float)width + eps);
}

OCTAVO_INLINE void scale_by(float* x, int width, float r, const float* weight) {
    for (int c = 0; c < width; ++c) x[c] = x[c] * r * weight[c];
}

OCTAVO_INLINE void layer_scale(float* x, int width, const float* weight, float eps) {
    vf sums = {}, squares = {};
    int c = 0;
    for (; c + L <= width; c += L) sums += load<vf>(x + c);
    float mean = sum_lanes(sums), sum;
    for (; c < width; ++c) mean += x[c];
    mean /= (float)width;
    for (c = 0; c + L <= width; c += L) {
        const vf d = load<vf>(x + c) - splat(mean);
        squares = fma(d, d, squares);
    }
    for (sum = sum_lanes(squares); c < width; ++c) sum += (x[c] - mean) * (x[c] - mean);
    const float r = 1.0f / __builtin_sqrtf(sum / (float)width + eps);
    for (c = 0; c < width; ++c) x[c] = (x[c] - mean) * r * weight[c];
}

// Stale slots of a block are multiplied with a zero probability, which only a finite value survives: the cache holds none but finite.
// `lost` says where something else was given, or what is above `limit`.
OCTAVO_INLINE vf finite(vf x, vi& lost, float limit = kLargestBf16) {
    const vf largest = splat(limit);
    lost |= ~(vi)(vabs(x) <= largest);
    return select((vi)(x != x), vf{}, vmin(vmax(x, -largest), largest));
}

// The lines of a block that a token's keys and values are written to: scattered, and in decode seldom in a cache.
void prefetch_slot(const RopeArgs& args, int64_t slot) {
    const int64_t panel_rows = kv_panel_bytes(args.kv, args.head_dim) / kPanelRowBytes;
    const uint8_t* block = args.pool + slot / kBlock * args.block_bytes;
    for (int h = 0; h < args.kv_heads; ++h) {
        const uint8_t* k = block + h * kv_head_bytes(args.kv, args.head_dim);
        for (int64_t i = 0; i < panel_rows; ++i) __builtin_prefetch(k + i * kPanelRowBytes, 1, 3);
        const uint8_t* v = k + panel_rows * kPanelRowBytes;
        const int bits = kv_bits(args.kv), tokens = bits < 8 ? 4 : 32 / bits, columns = bits < 8 ? 2 * kPanel : kPanel;  // of a row
        for (int c = 0; c < args.head_dim / columns; ++c)
            __builtin_prefetch(v + (c * (kBlock / tokens) + (int)(slot % kBlock) / tokens) * kPanelRowBytes, 1, 3);
        if (kv_scaled(args.kv)) __builtin_prefetch(v + panel_rows * kPanelRowBytes, 1, 3);
    }
}

}  // namespace

void store_activations(const ActView& out, int64_t row, int rows, int64_t column, int count, const float* values, int64_t stride) {
    switch (out.form) {
        case Act::F32: {
            for (int r = 0; r < rows; ++r)
                __builtin_memcpy((float*)out.data + (row + r) * out.width + column, values + r * stride, (size_t)count * 4);
            break;
        }
        case Act::BF16: {
            for (int r = 0; r < rows; ++r) {
                uint16_t* to = (uint16_t*)out.data + (row + r) * out.width + column;
                const float* from = values + r * stride;
                int c = 0;
                for (; c + L <= count; c += L) store_bf16(to + c, load<vf>(from + c));
                for (; c < count; ++c) to[c] = bf16_bits(from[c]);
            }
            break;
        }
        case Act::I8: {
            const int64_t groups = out.groups(), first = column / out.group;
            if (out.group > kKPad) {
                for (int r = 0; r < rows; ++r)
                    for (int c = 0; c < count; c += out.group)
                        quantize_wide(out, values + r * stride + c, (int8_t*)out.data + (row + r) * out.width + column + c,
                                      (row + r) * groups + first + c / out.group);
                break;
            }
            GroupPlace places[L];
            int held = 0;
            auto flush = [&] {
                if (out.group == 16) quantize_groups<16>(out, places, held);
                else quantize_groups<32>(out, places, held);
                held = 0;
            };
            for (int r = 0; r < rows; ++r)
                for (int c = 0; c < count; c += out.group) {
                    int8_t* to = (int8_t*)out.data + (row + r) * out.width + column + c;
                    places[held++] = {values + r * stride + c, to, (row + r) * groups + first + c / out.group};
                    if (held == L) flush();
                }
            if (held > 0) flush();
        }
    }
}

void embed_row(const EmbedArgs& args, int64_t row) {
    const WeightView& w = args.w;
    const int64_t column = args.tokens[row] + args.offset;
    float* out = args.out + row * args.out_stride;
    const uint8_t* panel = w.data + column / kPanel * w.panel_bytes + column % kPanel * 4;
    switch (w.form) {
        case Form::F32:
            for (int64_t k = 0; k < w.k; ++k) __builtin_memcpy(out + k, panel + k * kPanelRowBytes, 4);
            break;
        case Form::BF16:
            for (int64_t k = 0; k < w.k; ++k) {
                uint16_t b;
                __builtin_memcpy(&b, panel + k / 2 * kPanelRowBytes + k % 2 * 2, 2);
                out[k] = bf16_value(b);
            }
            break;
        case Form::E4M3:
        case Form::E5M2: {
            const uint8_t* codes = w.data + column / kPanel * w.panel_bytes + column % kPanel;
            for (int64_t k = 0; k < w.k; ++k)
                out[k] = group_value(w, w.scales, column, k / w.group) * f8_value(w.form == Form::E5M2, codes[k * kPanel]);
            break;
        }
        case Form::Lut4:
        case Form::Lut4F:
            for (int64_t k = 0; k < w.k; ++k) {
                const uint8_t both = panel[k / 8 * kPanelRowBytes + k % 4];
                out[k] = group_value(w, w.scales, column, k / w.group) * w.table[k % 8 < 4 ? both & 15 : both >> 4];
            }
            break;
        case Form::W8:
        case Form::W4:
            for (int64_t g = 0; g < w.groups; ++g) {
                const float scale = group_value(w, w.scales, column, g);
                const float minimum = w.minimums ? group_value(w, w.minimums, column, g) : 0.0f;
                const int64_t end = (g + 1) * w.group < w.k ? (g + 1) * w.group : w.k;
                for (int64_t k = g * w.group; k < end; ++k) {
                    int code;
                    if (w.form == Form::W8) {
                        code = panel[k / 4 * kPanelRowBytes + k % 4];
                    } else {
                        const uint8_t both = panel[k / 8 * kPanelRowBytes + k % 4];
                        code = k % 8 < 4 ? both & 15 : both >> 4;
                    }
                    out[k] = scale * (float)(code - w.zero) + minimum;
                }
            }
    }
    if (w.rotation != 0) rotate_blocks(out, out, (int)w.k, w.rotation);
    if (args.scale != 1.0f)
        for (int64_t k = 0; k < w.k; ++k) out[k] *= args.scale;
}

void norm_row(const NormArgs& args, int64_t row) {
    const float* x = args.x + (args.gather ? args.gather[row] : row) * args.x_stride;
    const int64_t width = args.width;
    float mean = 0.0f, r = 1.0f;
    if (args.weight) {
        if (args.layer) {
            vf sums = {};
            int64_t c = 0;
            for (; c + L <= width; c += L) sums += load<vf>(x + c);
            mean = sum_lanes(sums);
            for (; c < width; ++c) mean += x[c];
            mean /= (float)width;
        }
        vf squares = {};
        const vf m = splat(mean);
        int64_t c = 0;
        for (; c + L <= width; c += L) {
            vf d = load<vf>(x + c) - m;
            squares = fma(d, d, squares);
        }
        float sum = sum_lanes(squares);
        for (; c < width; ++c) sum += (x[c] - mean) * (x[c] - mean);
        r = 1.0f / __builtin_sqrtf(sum / (float)width + args.eps);
    }
    // Enough at once for the quantisation to work on whole vectors of groups.
    constexpr int kPiece = kKPad * L > kMaxActGroup ? kKPad * L : kMaxActGroup;
    alignas(64) float piece[kPiece];
    const int step = args.out.form == Act::I8 ? kPiece / args.out.group * args.out.group : kPiece;
    for (int64_t c = 0; c < args.out.width; c += step) {
        const int room = (int)(args.out.width - c < step ? args.out.width - c : step);
        const int count = (int)(width - c < 0 ? 0 : width - c < room ? width - c : room);
        if (!args.weight && !args.order && count == room) {
            store_activations(args.out, row, 1, c, room, x + c, 0);
            continue;
        }
        int i = 0;
        if (args.weight)
            for (; i + L <= count; i += L) {
                vf y = (load<vf>(x + c + i) - splat(mean)) * splat(r) * load<vf>(args.weight + c + i);
                if (args.bias) y = y + load<vf>(args.bias + c + i);
                store(piece + i, y);
            }
        for (; i < room; ++i) {
            if (i >= count) {
                piece[i] = 0.0f;
            } else if (args.weight) {
                float y = (x[c + i] - mean) * r * args.weight[c + i];
                piece[i] = args.bias ? y + args.bias[c + i] : y;
            } else {
                piece[i] = x[args.order ? args.order[c + i] : c + i];
            }
        }
        store_activations(args.out, row, 1, c, room, piece, 0);
    }
}

void rope_row(const RopeArgs& args, int64_t row) {
    const int dim = args.head_dim, half = args.rope_dim / 2;
    const float* in = args.qkv + row * args.stride;
    const int64_t position = args.positions[row];
    const float* cos = args.cos + position * half;
    const float* sin = args.sin + position * half;
    float head[kMaxHeadDim];
    uint32_t units[kMaxHeadDim / 2];  // of keys, two dimensions in each
    const int total = args.q_heads + args.kv_heads;
    const int64_t slot = args.slots[row];
    const int t = (int)(slot % kBlock);
    uint8_t* block = args.pool + slot / kBlock * args.block_bytes;
    const KvType kv = args.kv;
    const bool f32 = args.q_form == Act::F32;
    const int64_t panel_bytes = kv_panel_bytes(kv, dim), head_bytes = kv_head_bytes(kv, dim);
    // e4m3 has no infinity: what is above its numbers becomes the largest of them.
    const float most = kv == KvType::F16 ? kLargestF16 : kLargestBf16;
    const float most_k = kv == KvType::E5M2 ? kLargestE5M2 * args.k_scale : most, most_v = kv == KvType::E5M2 ? kLargestE5M2 * args.v_scale : most;
    vi lost = {};
    const float q_rms = args.wide_norms && args.q_norm ? inverse_rms(in, args.q_heads * dim, args.norm_eps) : 0.0f;
    const float k_rms = args.wide_norms && args.k_norm ? inverse_rms(in + args.q_heads * dim, args.kv_heads * dim, args.norm_eps) : 0.0f;
    // Tokens of one block are written one after another, and find its lines in the cache.
    if (t == 0 || row == 0 || args.slots[row - 1] != slot - 1) prefetch_slot(args, slot);
    for (int h = 0; h < total; ++h) {
        const bool is_q = h < args.q_heads;
        const float* norm = is_q ? args.q_norm : args.k_norm;
        const int own = is_q ? h * args.q_norm_stride : (h - args.q_heads) * args.k_norm_stride;
        const float* x = in + h * dim;
        if (norm && !args.norm_after) {
            __builtin_memcpy(head, x, (size_t)dim * 4);
            if (args.norm_layer) layer_scale(head, dim, norm + own, args.norm_eps);
            else if (args.wide_norms) scale_by(head, dim, is_q ? q_rms : k_rms, norm + own);
            else scale_by(head, dim, inverse_rms(head, dim, args.norm_eps), norm + own);
            x = head;
        }
        int i = 0;
        for (; i + L <= half; i += L) {
            const vf a = load<vf>(x + i), b = load<vf>(x + half + i), c = load<vf>(cos + i), s = load<vf>(sin + i);
            store(head + i, a * c - b * s);
            store(head + half + i, b * c + a * s);
        }
        for (; i < half; ++i) {
            const float a = x[i], b = x[half + i];
            head[i] = a * cos[i] - b * sin[i];
            head[half + i] = b * cos[i] + a * sin[i];
        }
        if (x != head && 2 * half < dim) __builtin_memcpy(head + 2 * half, x + 2 * half, (size_t)(dim - 2 * half) * 4);
        if (norm && args.norm_after) scale_by(head, dim, inverse_rms(head, dim, args.norm_eps), norm + own);
        if (is_q && args.q_factors)
            for (int c = 0; c < dim; c += L) store(head + c, load<vf>(head + c) * splat(args.q_factors[position]));
        if (kv == KvType::I4) {
            if (!is_q)
                for (int c = 0; c < dim; c += L) store(head + c, finite(load<vf>(head + c), lost));
            rotate_head(head, dim);
        }
        if (is_q) {
            const int64_t at = row * args.q_heads * dim + h * dim;
            if (f32) {
                __builtin_memcpy((float*)args.q_out + at, head, (size_t)dim * 4);
            } else {
                for (int c = 0; c < dim; c += L) store_bf16((uint16_t*)args.q_out + at + c, load<vf>(head + c));
            }
            continue;
        }
        uint8_t* k_panel = block + (h - args.q_heads) * head_bytes;
        if (kv_widened(kv)) {
            for (int c = 0; c < dim; c += L) store(head + c, finite(load<vf>(head + c), lost, most_k));
            append_codes(kv, k_panel, true, t, dim, head, 1.0f / args.k_scale, (uint16_t*)(k_panel + 2 * panel_bytes) + t);
            continue;
        }
        if (f32) {
            for (int c = 0; c < dim; c += L) store(head + c, finite(load<vf>(head + c), lost));
        } else {
            for (int c = 0; c < dim; c += L) store_bf16(units + c / 2, finite(load<vf>(head + c), lost));
        }
        const uint32_t* from = f32 ? (const uint32_t*)head : units;
        for (int64_t u = 0; u < panel_bytes / kPanelRowBytes; ++u) __builtin_memcpy(k_panel + (u * kBlock + t) * 4, from + u, 4);
    }
    for (int h = 0; h < args.kv_heads; ++h) {
        const float* v = in + (total + h) * dim;
        uint8_t* v_panel = block + h * head_bytes + panel_bytes;
        if (kv_widened(kv)) {
            for (int c = 0; c < dim; c += L) store(head + c, finite(load<vf>(v + c), lost, most_v));
            if (kv == KvType::I4) {
                rotate_head(head, dim);
                for (int c = 0; c < dim; c += L) store(head + c, finite(load<vf>(head + c), lost));
            }
            append_codes(kv, v_panel, false, t, dim, head, 1.0f / args.v_scale, (uint16_t*)(v_panel + panel_bytes) + kBlock + t);
            continue;
        }
        for (int c = 0; c < dim; c += L) {
            const vf value = finite(load<vf>(v + c), lost);
            if (f32) {
                store((float*)v_panel + (c / kPanel * kBlock + t) * kPanel + c % kPanel, value);
                continue;
            }
            // Every second bf16 of the row belongs to this token; the others may be being written by another thread.
            uint16_t* to = (uint16_t*)v_panel + (c / kPanel * (kBlock / 2) + t / 2) * 2 * kPanel + c % kPanel * 2;
#if defined(__AVX512BW__)
            const vu bits = bf16_bits(value);
            _mm512_mask_storeu_epi16(to, t % 2 ? 0xaaaaaaaau : 0x55555555u, (__m512i)(t % 2 ? bits << 16 : bits));
#else
            uint16_t bits[L];
            store_bf16(bits, value);
            for (int i = 0; i < L; ++i) to[2 * i + t % 2] = bits[i];
#endif
        }
    }
    if (!any_lane(lost)) return;
    // What the cache cannot hold must not go unnoticed: the token itself attends with queries that are not numbers.
    const int64_t begin = row * args.q_heads * dim, end = begin + args.q_heads * dim;
    for (int64_t i = begin; i < end; ++i) {
        if (f32) ((float*)args.q_out)[i] = __builtin_nanf("");
        else ((uint16_t*)args.q_out)[i] = 0x7fc0;
    }
}

void elementwise(const ElementwiseArgs& args, int64_t row) {
    const float* a = args.a + row * args.a_stride;
    const float* b = args.b ? args.b + row * args.b_stride : a;
    float* out = args.out + row * args.out_stride;
    vf scalar = splat(args.scalar), inverse = splat(1.0f / args.scalar);
    if (args.kind == Elementwise::SigmoidGate) {
        scalar = splat(1.0f) / (splat(1.0f) + vexp(splat(-b[0])));
        b = a;
    }
    auto apply = [&](vf x, vf y) {
        switch (args.kind) {
            case Elementwise::Add: return x + y;
            case Elementwise::Scale: return x * scalar;
            case Elementwise::Softcap: return scalar * vtanh(x * inverse);
            case Elementwise::SiluMul: return vsilu(x) * y;
            case Elementwise::GeluMul: return vgelu(x) * y;
            case Elementwise::GeluTanhMul: return vgelu_tanh(x) * y;
            case Elementwise::Gelu: return vgelu(x);
            case Elementwise::GeluTanh: return vgelu_tanh(x);
            case Elementwise::Silu: return vsilu(x);
            case Elementwise::Relu: return vrelu(x);
            case Elementwise::Relu2: return vrelu(x) * vrelu(x);
            case Elementwise::Clip: return vmin(scalar, vmax(-scalar, x));
            case Elementwise::SigmoidGate: return x * scalar;
        }
        return x;
    };
    int64_t c = 0;
    for (; c + L <= args.width; c += L) store(out + c, apply(load<vf>(a + c), load<vf>(b + c)));
    if (c < args.width) {
        float x[L] = {}, y[L] = {};
        const size_t bytes = (size_t)(args.width - c) * 4;
        __builtin_memcpy(x, a + c, bytes);
        __builtin_memcpy(y, b + c, bytes);
        store(x, apply(load<vf>(x), load<vf>(y)));
        __builtin_memcpy(out + c, x, bytes);
    }
}

}  // namespace octavo::OCTAVO_ISA
