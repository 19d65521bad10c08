// Paged attention: online softmax over chunks of 64 tokens inside spans of 512, straight from the packed pool.
// A block is [kv head]{K panel, V panel}: K has tokens as columns, V has dimensions as columns, so both products are the register
// tile of the linears with query rows (tokens x heads of a group) as rows, and nothing is repacked.
#include "gemm.h"
#include "kernels.h"

namespace octavo::OCTAVO_ISA {
namespace {

constexpr float kNoMaximum = -1e30f;  // finite, so that differences of maxima are never NaN
constexpr float kLog2E = 1.44269504088896341f;
constexpr int kChunkBlocks = kChunk / kBlock;
constexpr int kWide = kFloatVectors;  // vectors per tile where there are that many

// A running softmax of some rows, in powers of two: maximum of score * log2(e), sums by lane (a token's place in a vector), and values
// weighted by 2^(score - maximum).
struct State {
    float* maximum;
    float* sums;    // [rows][L]
    float* values;  // [rows][head_dim]
};

// a = a merged with b. Spans are always merged in rising order, wherever they were computed.
OCTAVO_INLINE void merge_row(float* max_a, float* sum_a, float* values_a, float max_b, float sum_b, const float* values_b, int dim) {
    const float m = *max_a > max_b ? *max_a : max_b;
    const vf ca = vexp2<true>(splat(*max_a - m)), cb = vexp2<true>(splat(max_b - m));
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

// The panels of a chunk for one kv head, and those of the chunk that follows: blocks lie anywhere, so their lines are asked for one by
// one while this chunk's are multiplied. Where nothing follows, they are this chunk's.
struct Panels {
    const uint8_t* k[kChunkBlocks];
    const uint8_t* v[kChunkBlocks];
    const uint8_t* next_k[kChunkBlocks];
    const uint8_t* next_v[kChunkBlocks];
};

// dot_tile, which also asks for the lines at the same places of `next`.
template <class Dot, bool Ahead, int MR, int NV>
OCTAVO_INLINE void dot_and_prefetch(vf (&acc)[MR][NV], const uint8_t* const (&a)[MR], const uint8_t* const (&w)[NV],
                                    const uint8_t* const (&next)[NV], int64_t units) {
    for (int64_t u = 0; u < units; ++u) {
        vu wv[NV];
#pragma GCC unroll 8
        for (int j = 0; j < NV; ++j) {
            wv[j] = load<vu>(w[j] + u * kPanelRowBytes);
            if (Ahead && (NV == 1 || j % PV == 0)) __builtin_prefetch(next[j] + u * kPanelRowBytes, 0, 2);
        }
#pragma GCC unroll 8
        for (int i = 0; i < MR; ++i) {
            vu av = splat(load_u32(a[i] + u * 4));
#pragma GCC unroll 8
            for (int j = 0; j < NV; ++j) acc[i][j] = Dot::run(acc[i][j], wv[j], av);
        }
    }
}

// Calls columns(integral constant NV, v) for vectors [0, count) in the widest tiles.
template <class Columns>
OCTAVO_INLINE void for_column_tiles(int count, Columns&& columns) {
    int v = 0;
    for (; v + kWide <= count; v += kWide) columns(std::integral_constant<int, kWide>{}, v);
    if constexpr (kWide > 2)
        for (; v + 2 <= count; v += 2) columns(std::integral_constant<int, 2>{}, v);
    for (; v < count; ++v) columns(std::integral_constant<int, 1>{}, v);
}

// scores[row][0, blocks * 16) = q[row] . K, for MR rows
template <bool F32, bool Ahead, int MR>
void score_tile(const uint8_t* const (&q)[MR], const Panels& panels, int blocks, int dim, float* scores) {
    using Dot = typename Kv<F32>::Dot;
    for_column_tiles(blocks * PV, [&](auto nv, int v) {
        constexpr int NV = decltype(nv)::value;
        const uint8_t *w[NV], *next[NV];
        for (int j = 0; j < NV; ++j) {
            w[j] = panels.k[(v + j) / PV] + (v + j) % PV * VB;
            next[j] = panels.next_k[(v + j) / PV] + (v + j) % PV * VB;
        }
        vf acc[MR][NV];
#pragma GCC unroll 8
        for (int i = 0; i < MR; ++i)
#pragma GCC unroll 8
            for (int j = 0; j < NV; ++j) acc[i][j] = vf{};
        dot_and_prefetch<Dot, Ahead>(acc, q, w, next, dim / Dot::kPerUnit);
#pragma GCC unroll 8
        for (int i = 0; i < MR; ++i)
#pragma GCC unroll 8
            for (int j = 0; j < NV; ++j) store(scores + i * kChunk + (v + j) * L, acc[i][j]);
    });
}

// values[row] += probabilities[row] . V, blocks in order, for MR rows; from nothing if fresh.
template <bool F32, bool Ahead, int MR>
void value_tile(const uint8_t* probabilities, const Panels& panels, int blocks, int dim, float* values, bool fresh) {
    using Dot = typename Kv<F32>::Dot;
    constexpr int kUnits = Kv<F32>::kUnitsPerBlock;
    constexpr int64_t kRowBytes = kChunk * Kv<F32>::kBytes;
    for_column_tiles(dim / L, [&](auto nv, int v) {
        constexpr int NV = decltype(nv)::value;
        vf acc[MR][NV];
#pragma GCC unroll 8
        for (int i = 0; i < MR; ++i)
#pragma GCC unroll 8
            for (int j = 0; j < NV; ++j) acc[i][j] = fresh ? vf{} : load<vf>(values + i * dim + (v + j) * L);
        for (int b = 0; b < blocks; ++b) {
            const uint8_t* a[MR];
            for (int i = 0; i < MR; ++i) a[i] = probabilities + i * kRowBytes + b * kUnits * 4;
            const uint8_t *w[NV], *next[NV];
            for (int j = 0; j < NV; ++j) {
                const int64_t at = (v + j) / PV * (kUnits * kPanelRowBytes) + (v + j) % PV * VB;
                w[j] = panels.v[b] + at;
                next[j] = panels.next_v[b] + at;
            }
            dot_and_prefetch<Dot, Ahead>(acc, a, w, next, kUnits);
        }
#pragma GCC unroll 8
        for (int i = 0; i < MR; ++i)
#pragma GCC unroll 8
            for (int j = 0; j < NV; ++j) store(values + i * dim + (v + j) * L, acc[i][j]);
    });
}

// Scores to probabilities relative to the new maximum of each row; the state is rescaled to it.
// Vectors: of scores to a row, 0 where only `vectors` says. What a row gets does not depend on it: a token not seen adds exact zeros.
template <bool F32, int Vectors>
void soften(const AttentionArgs& args, const int32_t* positions, int rows, int base, int blocks, float* scores,
            uint8_t* probabilities, const State& s, bool fresh) {
    const int vectors = Vectors ? Vectors : blocks * PV;
    const vf factor = splat(args.softcap > 0.0f ? kLog2E : args.scale * kLog2E);
    float now[kAttentionRows + L], correction[kAttentionRows + L];
    bool moved = false;
    for (int r = 0; r < rows; ++r) {
        float* row = scores + r * kChunk;
        const int last = positions[r];
        const int first = args.window > 0 && last - args.window + 1 > 0 ? last - args.window + 1 : 0;
        if (args.softcap > 0.0f)
            for (int v = 0; v < vectors; ++v)
                store(row + v * L, splat(args.softcap) * vtanh(load<vf>(row + v * L) * splat(args.scale) * splat(1.0f / args.softcap)));
        if (base + blocks * kBlock - 1 > last || base < first) {
            vi lane;
            for (int i = 0; i < L; ++i) lane[i] = i;
            for (int v = 0; v < vectors; ++v) {
                const vi token = splat((int32_t)(base + v * L)) + lane;
                const vi seen = (vi)(token <= splat((int32_t)last)) & (vi)(token >= splat((int32_t)first));
                store(row + v * L, select(seen, load<vf>(row + v * L), splat(-__builtin_inff())));
            }
        }
        vf largest = splat(kNoMaximum);
        for (int v = 0; v < vectors; ++v) largest = vmax(load<vf>(row + v * L), largest);
        const float before = fresh ? kNoMaximum : s.maximum[r];
        now[r] = vmax(max_everywhere(largest) * factor, splat(before))[0];
        correction[r] = before - now[r];
        moved |= correction[r] != 0.0f;
    }
    for (int r = 0; r < rows; ++r) {
        const float* row = scores + r * kChunk;
        const vf offset = splat(-now[r]);
        vf sums = {};
        uint8_t* to = probabilities + r * kChunk * Kv<F32>::kBytes;
        auto probability = [&](int v) { return vexp2<F32>(fma(load<vf>(row + v * L), factor, offset)); };
        if constexpr (F32) {
            for (int v = 0; v < vectors; ++v) {
                const vf p = probability(v);
                sums += p;
                store(to + v * VB, p);
            }
        } else {
            for (int v = 0; v < vectors; v += 2) {
                const vf p = probability(v), q = v + 1 < vectors ? probability(v + 1) : vf{};
                sums += p;
                sums += q;
                const vu pairs = bf16_of(p, q);
                store(to + v * (VB / 2), pairs);
            }
        }
        s.maximum[r] = now[r];
        float* total = s.sums + r * L;
        if (!fresh && !moved) sums += load<vf>(total);
        if (fresh || !moved) {
            store(total, sums);
        } else {
            const vf c = vexp2<true>(splat(correction[r]));
            store(total, load<vf>(total) * c + sums);
            float* values = s.values + (int64_t)r * args.head_dim;
            for (int i = 0; i < args.head_dim; i += L) store(values + i, load<vf>(values + i) * c);
        }
    }
}

template <bool F32>
void run_item(const AttentionArgs& args, const AttentionItem& item, uint8_t* scratch) {
    const int dim = args.head_dim, group = args.q_heads / args.kv_heads;
    const int64_t row_stride = (int64_t)args.q_heads * dim * Kv<F32>::kBytes;
    const int64_t panel_bytes = (int64_t)dim * kBlock * Kv<F32>::kBytes;
    const int32_t* table = args.block_tables + item.sequence * args.table_stride;
    State span{(float*)scratch, (float*)scratch + kAttentionRows, (float*)scratch + kAttentionRows * (1 + kPanel)};
    float* rest = span.values + (int64_t)kAttentionRows * dim;
    State total{rest, rest + kAttentionRows, rest + kAttentionRows * (1 + kPanel)};
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
                const int end = (s + 1) * kSpan - 1 < last ? (s + 1) * kSpan - 1 : last;
                bool fresh = true;
                for (int base = s * kSpan > start ? s * kSpan : start; base <= end; base += kChunk) {
                    const int blocks = (last - base) / kBlock + 1 < kChunkBlocks ? (last - base) / kBlock + 1 : kChunkBlocks;
                    auto panels_of = [&](int h) {
                        Panels p;
                        for (int b = 0; b < blocks; ++b) {
                            const int block = base / kBlock + b, next = block + kChunkBlocks;
                            p.k[b] = args.pool + table[block] * args.block_bytes + h * 2 * panel_bytes;
                            p.v[b] = p.k[b] + panel_bytes;
                            p.next_k[b] = next * kBlock <= last ? args.pool + table[next] * args.block_bytes + h * 2 * panel_bytes : p.k[b];
                            p.next_v[b] = p.next_k[b] + panel_bytes;
                        }
                        return p;
                    };
                    auto soften_rows = [&](int begin, int count, int blocks) {
                        const State some{state.maximum + begin, state.sums + begin * L, state.values + (int64_t)begin * dim};
                        float* from = scores + begin * kChunk;
                        uint8_t* to = probabilities + (int64_t)begin * kChunk * Kv<F32>::kBytes;
                        if (blocks == kChunkBlocks) soften<F32, kChunkBlocks * PV>(args, positions + begin, count, base, blocks, from, to, some, fresh);
                        else soften<F32, 0>(args, positions + begin, count, base, blocks, from, to, some, fresh);
                    };
                    auto score = [&](const Panels& panels, auto mr, int at, int blocks, auto ahead) {
                        constexpr int MR = decltype(mr)::value;
                        const uint8_t* a[MR];
                        for (int i = 0; i < MR; ++i) a[i] = q[at + i];
                        score_tile<F32, decltype(ahead)::value, MR>(a, panels, blocks, dim, scores + at * kChunk);
                    };
                    auto add_values = [&](const Panels& panels, auto mr, int at, int blocks, auto ahead) {
                        constexpr int MR = decltype(mr)::value;
                        value_tile<F32, decltype(ahead)::value, MR>(probabilities + (int64_t)at * kChunk * Kv<F32>::kBytes, panels, blocks, dim,
                                                                    state.values + (int64_t)at * dim, fresh);
                    };
                    if (rows_per_head <= kFloatRows) {
                        // One tile a head: the heads' latencies overlap.
                        Panels panels[kAttentionRows];
                        for (int i = 0; i < kv_heads; ++i) {
                            panels[i] = panels_of(h0 + i);
                            for_row_tiles<kFloatRows>(rows_per_head, [&](auto mr, int) { score(panels[i], mr, i * rows_per_head, blocks, std::true_type{}); });
                        }
                        soften_rows(0, rows, blocks);
                        for (int i = 0; i < kv_heads; ++i)
                            for_row_tiles<kFloatRows>(rows_per_head, [&](auto mr, int) { add_values(panels[i], mr, i * rows_per_head, blocks, std::true_type{}); });
                    } else {
                        for (int i = 0; i < kv_heads; ++i) {
                            const Panels panels = panels_of(h0 + i);
                            for_row_tiles<kFloatRows>(rows_per_head, [&](auto mr, int done) {
                                const int at = i * rows_per_head + done;
                                const int most = positions[at + mr - 1] < base ? 1 : (positions[at + mr - 1] - base) / kBlock + 1;
                                const int seen = most < blocks ? most : blocks;  // what lies behind the last row's token adds nothing
                                score(panels, mr, at, seen, std::false_type{});
                                soften_rows(at, mr, seen);
                                add_values(panels, mr, at, seen, std::false_type{});
                            });
                        }
                    }
                    fresh = false;
                }
                if (item.partial >= 0) {
                    for (int r = 0; r < rows; ++r) {
                        const int64_t slot = item.partial + row_head[r] +
                                             ((int64_t)(s - item.first_span) * tokens + row_token[r] - item.token_begin) * args.q_heads;
                        float* to = args.partials + slot * (dim + 2);
                        to[0] = state.maximum[r];
                        to[1] = sum_lanes(load<vf>(state.sums + r * L));
                        __builtin_memcpy(to + 2, state.values + (int64_t)r * dim, (size_t)dim * 4);
                    }
                } else if (first) {
                    for (int r = 0; r < rows; ++r) total.sums[r * L] = sum_lanes(load<vf>(total.sums + r * L));
                } else {
                    for (int r = 0; r < rows; ++r)
                        merge_row(total.maximum + r, total.sums + r * L, total.values + (int64_t)r * dim, state.maximum[r],
                                  sum_lanes(load<vf>(state.sums + r * L)), state.values + (int64_t)r * dim, dim);
                }
                first = false;
            }
            if (item.partial >= 0) continue;
            for (int r = 0; r < rows; ++r) {
                float* values = total.values + (int64_t)r * dim;
                const vf inverse = splat(1.0f / total.sums[r * L]);
                for (int c = 0; c < dim; c += L) store(values + c, load<vf>(values + c) * inverse);
            }
            // What a token has from the heads of a group, or from all, lies side by side here as there.
            const int together = tokens == 1 && heads == group ? kv_heads : 1, columns = together * heads * dim;
            for (int i = 0; i < kv_heads; i += together)
                store_activations(args.out, item.token_begin, tokens, (int64_t)row_head[i * rows_per_head] * dim, columns,
                                  total.values + (int64_t)i * rows_per_head * dim, columns);
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
        const vf inverse = splat(1.0f / sum);
        for (int c = 0; c < dim; c += L) store(values + c, load<vf>(values + c) * inverse);
        store_activations(args.out, token, 1, (int64_t)head * dim, dim, values, dim);
    }
}

}  // namespace octavo::OCTAVO_ISA
