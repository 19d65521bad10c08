// Paged attention: online softmax over chunks of 64 tokens inside spans of 512, straight from the packed pool.
// A block is [kv head]{K panel, V panel}: K has tokens as columns, V has dimensions as columns, so both products are the register
// tile of the linears with query rows (tokens x heads of a group) as rows, and nothing is repacked.
#include "gemm.h"
#include "kernels.h"

namespace octavo::OCTAVO_ISA {
namespace {

constexpr float kNoMaximum = -1e30f;  // finite, so that differences of maxima are never NaN
constexpr int kChunkBlocks = kChunk / kBlock;
constexpr int kWide = kFloatVectors;  // vectors per tile where there are that many

// A running softmax of some rows: maximum, sum, and values weighted by exp(score - maximum).
struct State {
    float* maximum;
    float* sum;
    float* values;  // [rows][head_dim]
};

void reset(const State& s, int rows, int dim) {
    for (int r = 0; r < rows; ++r) s.maximum[r] = kNoMaximum, s.sum[r] = 0.0f;
    __builtin_memset(s.values, 0, (size_t)rows * dim * 4);
}

// a = a merged with b. Spans are always merged in rising order, wherever they were computed.
OCTAVO_INLINE void merge_row(float* max_a, float* sum_a, float* values_a, float max_b, float sum_b, const float* values_b, int dim) {
    const float m = *max_a > max_b ? *max_a : max_b;
    const vf ca = vexp(splat(*max_a - m)), cb = vexp(splat(max_b - m));
    *max_a = m;
    *sum_a = fma(splat(sum_b), cb, splat(*sum_a) * ca)[0];
    for (int c = 0; c < dim; c += L) store(values_a + c, fma(load<vf>(values_b + c), cb, load<vf>(values_a + c) * ca));
}

template <bool F32>
struct Kv {
    using Dot = std::conditional_t<F32, DotF32, DotBf16>;
    static constexpr int kBytes = F32 ? 4 : 2;
    static constexpr int kUnitsPerBlock = kBlock * kBytes / 4;  // 4-byte units of k (tokens) of a V panel
};

// scores[row][0, blocks * 16) = q[row] . K
template <bool F32>
void score_blocks(const uint8_t* const* q, int rows, const uint8_t* const* k_panels, int blocks, int dim, float* scores) {
    using Dot = typename Kv<F32>::Dot;
    const int64_t units = dim / Dot::kPerUnit;
    const int vectors = blocks * PV;
    auto columns = [&](auto nv, int v) {
        constexpr int NV = decltype(nv)::value;
        const uint8_t* w[NV];
        for (int j = 0; j < NV; ++j) w[j] = k_panels[(v + j) / PV] + (v + j) % PV * VB;
        for_row_tiles<kFloatRows>(rows, [&](auto mr, int done) {
            constexpr int MR = decltype(mr)::value;
            const uint8_t* a[MR];
            for (int i = 0; i < MR; ++i) a[i] = q[done + i];
            vf acc[MR][NV] = {};
            dot_tile<Dot, MR, NV>(acc, a, w, units);
            for (int i = 0; i < MR; ++i)
                for (int j = 0; j < NV; ++j) store(scores + (done + i) * kChunk + (v + j) * L, acc[i][j]);
        });
    };
    int v = 0;
    for (; v + kWide <= vectors; v += kWide) columns(std::integral_constant<int, kWide>{}, v);
    for (; v < vectors; ++v) columns(std::integral_constant<int, 1>{}, v);
}

// values[row] += probabilities[row] . V, blocks in order.
template <bool F32>
void add_values(const uint8_t* probabilities, int rows, const uint8_t* const* v_panels, int blocks, int dim, float* values) {
    using Dot = typename Kv<F32>::Dot;
    constexpr int kUnits = Kv<F32>::kUnitsPerBlock;
    constexpr int64_t kRowBytes = kChunk * Kv<F32>::kBytes;
    const int vectors = dim / L;
    auto columns = [&](auto nv, int v) {
        constexpr int NV = decltype(nv)::value;
        for_row_tiles<kFloatRows>(rows, [&](auto mr, int done) {
            constexpr int MR = decltype(mr)::value;
            vf acc[MR][NV];
            for (int i = 0; i < MR; ++i)
                for (int j = 0; j < NV; ++j) acc[i][j] = load<vf>(values + (done + i) * dim + (v + j) * L);
            for (int b = 0; b < blocks; ++b) {
                const uint8_t* a[MR];
                for (int i = 0; i < MR; ++i) a[i] = probabilities + (done + i) * kRowBytes + b * kUnits * 4;
                const uint8_t* w[NV];
                for (int j = 0; j < NV; ++j)
                    w[j] = v_panels[b] + (v + j) / PV * (kUnits * kPanelRowBytes) + (v + j) % PV * VB;
                dot_tile<Dot, MR, NV>(acc, a, w, kUnits);
            }
            for (int i = 0; i < MR; ++i)
                for (int j = 0; j < NV; ++j) store(values + (done + i) * dim + (v + j) * L, acc[i][j]);
        });
    };
    int v = 0;
    for (; v + kWide <= vectors; v += kWide) columns(std::integral_constant<int, kWide>{}, v);
    for (; v < vectors; ++v) columns(std::integral_constant<int, 1>{}, v);
}

// Scores to probabilities relative to the new maximum of each row; the state is rescaled to it.
template <bool F32>
void soften(const AttentionArgs& args, const int32_t* positions, int rows, int base, int blocks, float* scores,
            uint8_t* probabilities, const State& s) {
    const vf scale = splat(args.scale);
    const vf cap = splat(args.softcap), inverse_cap = splat(args.softcap > 0.0f ? 1.0f / args.softcap : 0.0f);
    const int vectors = blocks * PV;
    vi lane;
    for (int i = 0; i < L; ++i) lane[i] = i;
    for (int r = 0; r < rows; ++r) {
        float* row = scores + r * kChunk;
        const int last = positions[r];
        const int first = args.window > 0 && last - args.window + 1 > 0 ? last - args.window + 1 : 0;
        const bool masked = base + blocks * kBlock - 1 > last || base < first;
        vf largest = splat(kNoMaximum);
        for (int v = 0; v < vectors; ++v) {
            vf x = load<vf>(row + v * L) * scale;
            if (args.softcap > 0.0f) x = cap * vtanh(x * inverse_cap);
            if (masked) {
                vi token = splat((int32_t)(base + v * L)) + lane;
                vi seen = (vi)(token <= splat((int32_t)last)) & (vi)(token >= splat((int32_t)first));
                x = select(seen, x, splat(-__builtin_inff()));
            }
            store(row + v * L, x);
            largest = vmax(x, largest);
        }
        const float before = s.maximum[r];
        const float now = max_lanes(largest);
        const float maximum = now > before ? now : before;
        vf sums = {};
        uint8_t* to = probabilities + r * kChunk * Kv<F32>::kBytes;
        for (int v = 0; v < vectors; ++v) {
            vf p = vexp(load<vf>(row + v * L) - splat(maximum));
            sums += p;
            if constexpr (F32) store(to + v * VB, p);
            else store_bf16(to + v * (VB / 2), p);
        }
        if (maximum != before) {
            const vf correction = vexp(splat(before - maximum));
            s.maximum[r] = maximum;
            s.sum[r] = (splat(s.sum[r]) * correction)[0];
            float* values = s.values + (int64_t)r * args.head_dim;
            for (int c = 0; c < args.head_dim; c += L) store(values + c, load<vf>(values + c) * correction);
        }
        s.sum[r] += sum_lanes(sums);
    }
}

// Decode is bound by memory and its blocks lie anywhere: the next chunk's lines are asked for while this one is computed.
void prefetch_chunk(const AttentionArgs& args, const int32_t* table, int base, int last, int head, int heads, int64_t panel_bytes) {
    for (int token = base; token < base + kChunk && token <= last; token += kBlock) {
        const uint8_t* from = args.pool + table[token / kBlock] * args.block_bytes + head * 2 * panel_bytes;
        for (int64_t i = 0; i < heads * 2 * panel_bytes; i += 64) __builtin_prefetch(from + i, 0, 2);
    }
}

template <bool F32>
void run_item(const AttentionArgs& args, const AttentionItem& item, uint8_t* scratch) {
    const int dim = args.head_dim, group = args.q_heads / args.kv_heads;
    const int64_t row_stride = (int64_t)args.q_heads * dim * Kv<F32>::kBytes;
    const int64_t panel_bytes = (int64_t)dim * kBlock * Kv<F32>::kBytes;
    const int32_t* table = args.block_tables + item.sequence * args.table_stride;
    State span{(float*)scratch, (float*)scratch + kAttentionRows, (float*)scratch + 4 * kAttentionRows};
    State total{span.sum + kAttentionRows, span.sum + 2 * kAttentionRows, span.values + (int64_t)kAttentionRows * dim};
    float* scores = total.values + (int64_t)kAttentionRows * dim;
    uint8_t* probabilities = (uint8_t*)(scores + kAttentionRows * kChunk);
    const int tokens = item.token_end - item.token_begin;
    const int heads_at_once = group < kAttentionRows ? group : kAttentionRows;
    // Few rows a head, as in decode: several kv heads together, so that a block is read in one piece.
    const int kv_at_once = kAttentionRows / (tokens * heads_at_once) > 1 ? kAttentionRows / (tokens * heads_at_once) : 1;
    const int last = args.positions[item.token_end - 1];  // positions of a sequence rise within a step
    const int oldest = args.positions[item.token_begin];
    const int start = args.window > 0 && oldest - args.window + 1 > 0 ? (oldest - args.window + 1) / kChunk * kChunk : 0;
    for (int h0 = item.head_begin; h0 < item.head_end; h0 += kv_at_once)
        for (int g0 = 0; g0 < group; g0 += heads_at_once) {
            const int kv_heads = item.head_end - h0 < kv_at_once ? item.head_end - h0 : kv_at_once;
            const int heads = group - g0 < heads_at_once ? group - g0 : heads_at_once;
            const int rows_per_head = tokens * heads, rows = rows_per_head * kv_heads;
            // Row r is kv head h0 + r / rows_per_head, token and head of the group in what remains.
            const uint8_t* q[kAttentionRows];
            int32_t positions[kAttentionRows], row_token[kAttentionRows], row_head[kAttentionRows];
            for (int r = 0; r < rows; ++r) {
                row_token[r] = item.token_begin + r % rows_per_head / heads;
                row_head[r] = (h0 + r / rows_per_head) * group + g0 + r % heads;
                q[r] = args.q + row_token[r] * row_stride + (int64_t)row_head[r] * dim * Kv<F32>::kBytes;
                positions[r] = args.positions[row_token[r]];
            }
            bool first = true;
            for (int s = item.span_begin; s < item.span_end; ++s) {
                const State& state = item.partial < 0 && first ? total : span;
                reset(state, rows, dim);
                const int end = (s + 1) * kSpan - 1 < last ? (s + 1) * kSpan - 1 : last;
                for (int base = s * kSpan > start ? s * kSpan : start; base <= end; base += kChunk) {
                    const int blocks = (int)((last - base) / kBlock + 1 < kChunkBlocks ? (last - base) / kBlock + 1 : kChunkBlocks);
                    const uint8_t* k_panels[kChunkBlocks];
                    const uint8_t* v_panels[kChunkBlocks];
                    auto panels_of = [&](int h) {
                        for (int b = 0; b < blocks; ++b) {
                            k_panels[b] = args.pool + table[base / kBlock + b] * args.block_bytes + h * 2 * panel_bytes;
                            v_panels[b] = k_panels[b] + panel_bytes;
                        }
                    };
                    if (rows_per_head <= kFloatRows) prefetch_chunk(args, table, base + kChunk, last, h0, kv_heads, panel_bytes);
                    for (int i = 0; i < kv_heads; ++i) {
                        panels_of(h0 + i);
                        score_blocks<F32>(q + i * rows_per_head, rows_per_head, k_panels, blocks, dim, scores + i * rows_per_head * kChunk);
                    }
                    soften<F32>(args, positions, rows, base, blocks, scores, probabilities, state);
                    for (int i = 0; i < kv_heads; ++i) {
                        panels_of(h0 + i);
                        add_values<F32>(probabilities + (int64_t)i * rows_per_head * kChunk * Kv<F32>::kBytes, rows_per_head, v_panels,
                                        blocks, dim, state.values + (int64_t)i * rows_per_head * dim);
                    }
                }
                if (item.partial >= 0) {
                    for (int r = 0; r < rows; ++r) {
                        const int64_t slot = item.partial + row_head[r] +
                                             ((int64_t)(s - item.first_span) * tokens + row_token[r] - item.token_begin) * args.q_heads;
                        float* to = args.partials + slot * (dim + 2);
                        to[0] = state.maximum[r];
                        to[1] = state.sum[r];
                        __builtin_memcpy(to + 2, state.values + (int64_t)r * dim, (size_t)dim * 4);
                    }
                } else if (!first) {
                    for (int r = 0; r < rows; ++r)
                        merge_row(total.maximum + r, total.sum + r, total.values + (int64_t)r * dim, state.maximum[r], state.sum[r],
                                  state.values + (int64_t)r * dim, dim);
                }
                first = false;
            }
            if (item.partial >= 0) continue;
            for (int r = 0; r < rows; ++r) {
                float* out = args.out + row_token[r] * args.out_stride + (int64_t)row_head[r] * dim;
                const vf inverse = splat(1.0f / total.sum[r]);
                for (int c = 0; c < dim; c += L) store(out + c, load<vf>(total.values + (int64_t)r * dim + c) * inverse);
            }
        }
}

}  // namespace

void attention_item(const AttentionArgs& args, const AttentionItem& item, uint8_t* scratch) {
    if (args.kv_f32) run_item<true>(args, item, scratch);
    else run_item<false>(args, item, scratch);
}

void attention_merge(const AttentionArgs& args, int64_t token, int partial, int spans, int64_t tokens) {
    const int dim = args.head_dim;
    float values[kMaxHeadDim];
    for (int head = 0; head < args.q_heads; ++head) {
        float maximum = 0.0f, sum = 0.0f;
        for (int s = 0; s < spans; ++s) {
            const float* from = args.partials + (partial + (int64_t)s * tokens * args.q_heads + head) * (dim + 2);
            if (s == 0) {
                maximum = from[0];
                sum = from[1];
                __builtin_memcpy(values, from + 2, (size_t)dim * 4);
            } else {
                merge_row(&maximum, &sum, values, from[0], from[1], from + 2, dim);
            }
        }
        float* out = args.out + token * args.out_stride + (int64_t)head * dim;
        const vf inverse = splat(1.0f / sum);
        for (int c = 0; c < dim; c += L) store(out + c, load<vf>(values + c) * inverse);
    }
}

}  // namespace octavo::OCTAVO_ISA
