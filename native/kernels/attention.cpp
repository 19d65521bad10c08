// Paged attention: online softmax over chunks of 64 tokens inside spans of 512, straight from the packed pool.
// A block is [kv head]{K panel, V panel}: K has tokens as columns, V has dimensions as columns, so both products are the register
// tile of the linears with query rows (tokens x heads of a group) as rows, and nothing is repacked. Panels of the narrower types are
// widened chunk by chunk, once for all rows.
#include "gemm.h"
#include "kernels.h"
#include "kv_panels.h"

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

// The sum of a row's softmax relative to `maximum`, a sink's part in it. Where the sink is far above all scores, nothing is left of them.
OCTAVO_INLINE float with_sink(const AttentionArgs& args, int head, float maximum, float sum) {
    if (!args.sinks) return sum;
    const float above = args.sinks[head] - maximum;
    return sum + vexp2<true>(splat(above < 126.0f ? above : 126.0f))[0];
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
// Scaled: scores are of codes, and so will be values; `k_scales` and `v_scales` have a factor for each token.
template <bool F32, bool Scaled, int Vectors>
void soften(const AttentionArgs& args, const int32_t* positions, const int32_t* heads, int rows, int base, int blocks, float* scores,
            uint8_t* probabilities, const State& s, bool fresh, const float* k_scales, const float* v_scales) {
    const int vectors = Vectors ? Vectors : blocks * PV;
    const vf factor = splat(args.softcap > 0.0f ? kLog2E : args.scale * kLog2E);
    float now[kAttentionRows + L], correction[kAttentionRows + L];
    bool moved = false;
    for (int r = 0; r < rows; ++r) {
        float* row = scores + r * kChunk;
        const int last = positions[r];
        const int first = first_seen(args.window, args.chunked, last);
        if constexpr (Scaled)
            for (int v = 0; v < vectors; ++v) store(row + v * L, load<vf>(row + v * L) * load<vf>(k_scales + v * L));
        if (args.softcap > 0.0f)
            for (int v = 0; v < vectors; ++v)
                store(row + v * L, splat(args.softcap) * vtanh(load<vf>(row + v * L) * splat(args.scale) * splat(1.0f / args.softcap)));
        vi lane;
        for (int i = 0; i < L; ++i) lane[i] = i;
        if (args.slopes)
            for (int v = 0; v < vectors; ++v) {
                const vf distance = to_float(splat((int32_t)(base + v * L - last)) + lane);  // absolute, so the same in every chunk
                store(row + v * L, fma(distance, splat(args.slopes[heads[r]]), load<vf>(row + v * L)));
            }
        if (base + blocks * kBlock - 1 > last || base < first) {
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
                vf p = probability(v), q = v + 1 < vectors ? probability(v + 1) : vf{};
                sums += p;
                sums += q;
                if constexpr (Scaled) {
                    p *= load<vf>(v_scales + v * L);
                    if (v + 1 < vectors) q *= load<vf>(v_scales + (v + 1) * L);
                }
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

// What is read after the chunks at hand, to be asked for while the last of them is multiplied: tokens from `block` to `last_block` of a
// table, for kv heads from `head` on.
struct Following {
    const int32_t* table = nullptr;
    int block = 0, last_block = -1, head = 0;
    bool any() const { return block <= last_block; }
};

// The work of one item: rows of queries against chunks of keys and values. Wide: those are stored in a narrower type than F32 says.
template <bool F32, bool Wide>
class Work {
  public:
    Work(const AttentionArgs& args, const AttentionItem& item, uint8_t* scratch)
        : args_(args), item_(item), dim_(args.head_dim), group_(args.q_heads / args.kv_heads),
          panel_bytes_(kv_panel_bytes(args.kv, args.head_dim)), head_bytes_(kv_head_bytes(args.kv, args.head_dim)) {
        float* at = (float*)scratch;
        auto state = [&](int rows) {
            const State s{at, at + rows, at + rows * (1 + kPanel)};
            at = s.values + (int64_t)rows * dim_;
            return s;
        };
        span_ = state(kAttentionRows);
        total_ = state(kAttentionRows);
        scores_ = at;
        at += kAttentionRows * kChunk;
        probabilities_ = (uint8_t*)at;
        at += kAttentionRows * kChunk;
        kept_total_ = state(kKeptRows);
        kept_span_ = state(kKeptRows);
        scales_ = at;
        wide_ = (uint8_t*)(at + 2 * kChunk);
    }

    void run() {
        int rows = 0;
        for (int p = 0; p < item_.pieces; ++p) rows += tokens(item_.piece[p]) * group_;
        const bool shared = item_.shared_chunks > 0;
        const int heads = item_.head_end - item_.head_begin;
        const int together = !shared ? heads : kKeptRows / rows < heads ? kKeptRows / rows : heads;
        for (int h = item_.head_begin; h < item_.head_end; h += together) {
            const int end = h + together < item_.head_end ? h + together : item_.head_end;
            if (shared)
                for (int i = h; i < end; ++i) share(i, h, end - h);
            int kept = 0;
            for (int p = 0; p < item_.pieces; ++p) {
                const AttentionPiece& piece = item_.piece[p];
                const int step = kv_at_once(piece), rows_per_head = tokens(piece) * group_;
                for (int i = h; i < end; i += step) {
                    Following next;
                    if (i + step < end) next = beginning(piece, i + step);
                    else if (p + 1 < item_.pieces) next = beginning(item_.piece[p + 1], h);
                    const int at = kept + (i - h) * rows_per_head;
                    attend(piece, i, end - i < step ? end - i : step, next, shared ? rows_of(kept_total_, at) : total_, shared ? rows_of(kept_span_, at) : span_);
                }
                kept += rows_per_head * (end - h);
            }
        }
    }

  private:
    static int tokens(const AttentionPiece& piece) { return piece.token_end - piece.token_begin; }
    State rows_of(const State& s, int row) const { return {s.maximum + row, s.sums + row * L, s.values + (int64_t)row * dim_}; }
    const int32_t* table_of(const AttentionPiece& piece) const { return args_.block_tables + piece.sequence * args_.table_stride; }
    // The first token that is looked at by the piece alone, a chunk's first one.
    int start_of(const AttentionPiece& piece) const {
        const int seen = first_seen(args_.window, args_.chunked, args_.positions[piece.token_begin]) / kChunk;
        const int alone = seen > item_.shared_chunks ? seen : item_.shared_chunks;
        return (alone > piece.span_begin * (kSpan / kChunk) ? alone : piece.span_begin * (kSpan / kChunk)) * kChunk;
    }
    int heads_at_once() const { return group_ < kAttentionRows ? group_ : kAttentionRows; }
    // Few rows a head, as in decode: several kv heads together, so that a block is read in one piece.
    int kv_at_once(const AttentionPiece& piece) const {
        const int most = kAttentionRows / (tokens(piece) * heads_at_once());
        return most > 1 ? most : 1;
    }
    Following beginning(const AttentionPiece& piece, int head) const {
        return {table_of(piece), start_of(piece) / kBlock, piece.last / kBlock, head};
    }

    // The rows at hand: `kv_heads` kv heads from `head` on; for each the tokens of the pieces, for each the heads of the group from g0 on.
    void take_rows(const AttentionPiece* pieces, int count, int head, int kv_heads, int g0, int heads) {
        head_ = head;
        kv_heads_ = kv_heads;
        rows_ = 0;
        for (int h = head; h < head + kv_heads; ++h)
            for (int p = 0; p < count; ++p)
                for (int t = pieces[p].token_begin; t < pieces[p].token_end; ++t)
                    for (int g = 0; g < heads; ++g, ++rows_) {
                        row_token_[rows_] = t;
                        row_head_[rows_] = h * group_ + g0 + g;
                        q_[rows_] = args_.q + ((int64_t)t * args_.q_heads + row_head_[rows_]) * dim_ * Kv<F32>::kBytes;
                        positions_[rows_] = args_.positions[t];
                    }
        rows_per_head_ = rows_ / kv_heads;
    }

    // The chunks that all pieces have in the same blocks, for one kv head (of `heads` from h0 on): their rows are multiplied together,
    // and where that leaves each is kept for attend() to go on from.
    void share(int head, int h0, int heads) {
        take_rows(item_.piece, item_.pieces, head, 1, 0, group_);
        const int end = item_.shared_chunks * kChunk;
        for (int s = 0; s * kSpan < end; ++s) {
            const State& state = s == 0 ? total_ : span_;
            const int span_end = (s + 1) * kSpan < end ? (s + 1) * kSpan : end;
            for (int base = s * kSpan; base < span_end; base += kChunk) {
                // Multiplying needs no bandwidth, and what comes then hardly anything else: with each of the last chunks one head of
                // the first chunk of one piece is asked for.
                const int passes = item_.shared_chunks * heads, wanted = item_.pieces * heads;
                const int pass = (head - h0) * item_.shared_chunks + base / kChunk, turn = passes > wanted ? pass - (passes - wanted) : pass;
                const Following next = turn >= 0 && turn < wanted ? beginning(item_.piece[turn / heads], h0 + turn % heads) : Following{};
                add_chunk(table_of(item_.piece[0]), base, end - 1, next, state, base == s * kSpan, true);
            }
            if (span_end == (s + 1) * kSpan) end_span(total_, state, s == 0);
        }
        const bool open = end > kSpan && end % kSpan != 0;
        int from = 0, kept = 0;
        for (int p = 0; p < item_.pieces; ++p) {
            const int count = tokens(item_.piece[p]) * group_, to = kept + (head - h0) * count;
            copy(total_, from, kept_total_, to, count);
            if (open) copy(span_, from, kept_span_, to, count);
            from += count;
            kept += count * heads;
        }
    }

    void copy(const State& from, int row, const State& to, int to_row, int count) const {
        const State a = rows_of(from, row), b = rows_of(to, to_row);
        __builtin_memcpy(b.maximum, a.maximum, (size_t)count * 4);
        __builtin_memcpy(b.sums, a.sums, (size_t)count * L * 4);
        __builtin_memcpy(b.values, a.values, (size_t)count * dim_ * 4);
    }

    // A piece from where the shared chunks end (the beginning where there are none) to its own end, for kv heads [head, head + kv_heads).
    // `total`: the spans that have ended, or the first; `span`: the one that has not.
    void attend(const AttentionPiece& piece, int head, int kv_heads, const Following& next, const State& total, const State& span) {
        const int32_t* table = table_of(piece);
        const int last = piece.last, start = start_of(piece), count = tokens(piece);
        for (int g0 = 0; g0 < group_; g0 += heads_at_once()) {
            const int heads = group_ - g0 < heads_at_once() ? group_ - g0 : heads_at_once();
            take_rows(&piece, 1, head, kv_heads, g0, heads);
            const int begun = item_.shared_chunks * kChunk % kSpan ? item_.shared_chunks * kChunk / kSpan : -1;  // a span that share() began
            for (int s = start / kSpan; s < piece.span_end; ++s) {
                const bool first = s == piece.span_begin;
                const State& state = item_.partial < 0 && first ? total : span;
                const int end = (s + 1) * kSpan - 1 < last ? (s + 1) * kSpan - 1 : last;
                bool fresh = s != begun;
                for (int base = s * kSpan > start ? s * kSpan : start; base <= end; base += kChunk) {
                    add_chunk(table, base, last, next, state, fresh);
                    fresh = false;
                }
                if (item_.partial < 0) end_span(total, state, first);
                else keep_partial(s, count, piece.token_begin, state);
            }
            if (item_.partial < 0) write(piece, total, heads);
        }
    }

    // Of the rows at hand, what a span came to joins what the spans before did.
    void end_span(const State& total, const State& state, bool first) const {
        for (int r = 0; r < rows_; ++r) {
            const float sum = sum_lanes(load<vf>(state.sums + r * L));
            if (first) total.sums[r * L] = sum;
            else merge_row(total.maximum + r, total.sums + r * L, total.values + (int64_t)r * dim_, state.maximum[r], sum, state.values + (int64_t)r * dim_, dim_);
        }
    }

    void keep_partial(int span, int tokens, int token_begin, const State& state) const {
        for (int r = 0; r < rows_; ++r) {
            const int64_t slot = item_.partial + row_head_[r] + ((int64_t)(span - item_.first_span) * tokens + row_token_[r] - token_begin) * args_.q_heads;
            float* to = args_.partials + slot * (dim_ + 2);
            to[0] = state.maximum[r];
            to[1] = sum_lanes(load<vf>(state.sums + r * L));
            __builtin_memcpy(to + 2, state.values + (int64_t)r * dim_, (size_t)dim_ * 4);
        }
    }

    void write(const AttentionPiece& piece, const State& total, int heads) const {
        for (int r = 0; r < rows_; ++r) {
            float* values = total.values + (int64_t)r * dim_;
            const vf inverse = splat(args_.v_scale / with_sink(args_, row_head_[r], total.maximum[r], total.sums[r * L]));
            for (int c = 0; c < dim_; c += L) store(values + c, load<vf>(values + c) * inverse);
            if (Wide && args_.kv == KvType::I4) rotate_head(values, dim_);
        }
        // What a token has from the heads of a group, or from all, lies side by side here as there.
        const int count = tokens(piece), together = count == 1 && heads == group_ ? kv_heads_ : 1, columns = together * heads * dim_;
        for (int i = 0; i < kv_heads_; i += together)
            store_activations(args_.out, piece.token_begin, count, (int64_t)row_head_[i * rows_per_head_] * dim_, columns,
                              total.values + (int64_t)i * rows_per_head_ * dim_, columns);
    }

    // The rows at hand against the chunk from token `base` on, of a table whose last token is `last`. `both`: what is asked for is
    // `next` and, where there are tiles enough, the chunk that follows; else `next` behind the last chunk only.
    void add_chunk(const int32_t* table, int base, int last, const Following& next, const State& state, bool fresh, bool both = false) {
        const int blocks = (last - base) / kBlock + 1 < kChunkBlocks ? (last - base) / kBlock + 1 : kChunkBlocks;
        const Following own = {table, base / kBlock + kChunkBlocks, last / kBlock, head_};
        auto panels_of = [&](int i, const Following& after) {
            Panels p;
            for (int b = 0; b < blocks; ++b) {
                p.k[b] = args_.pool + table[base / kBlock + b] * args_.block_bytes + (head_ + i) * head_bytes_;
                p.v[b] = p.k[b] + panel_bytes_;
                const bool any = after.block + b <= after.last_block && after.head + i < args_.kv_heads;
                p.next_k[b] = any ? args_.pool + after.table[after.block + b] * args_.block_bytes + (after.head + i) * head_bytes_ : p.k[b];
                p.next_v[b] = p.next_k[b] + panel_bytes_;
            }
            return p;
        };
        auto soften_rows = [&](int at, int count, int blocks) {
            const State some = rows_of(state, at);
            float* from = scores_ + at * kChunk;
            uint8_t* to = probabilities_ + (int64_t)at * kChunk * Kv<F32>::kBytes;
            auto soften_as = [&](auto scaled) {
                constexpr bool Scaled = decltype(scaled)::value;
                const float *k = scales_, *v = scales_ + kChunk;
                if (blocks == kChunkBlocks) soften<F32, Scaled, kChunkBlocks * PV>(args_, positions_ + at, row_head_ + at, count, base, blocks, from, to, some, fresh, k, v);
                else soften<F32, Scaled, 0>(args_, positions_ + at, row_head_ + at, count, base, blocks, from, to, some, fresh, k, v);
            };
            if (Wide && !F32 && kv_scaled(args_.kv)) soften_as(std::bool_constant<Wide && !F32>{});
            else soften_as(std::false_type{});
        };
        auto score = [&](const Panels& panels, auto mr, int at, int blocks, auto ahead) {
            constexpr int MR = decltype(mr)::value;
            const uint8_t* a[MR];
            for (int i = 0; i < MR; ++i) a[i] = q_[at + i];
            score_tile<F32, decltype(ahead)::value, MR>(a, panels, blocks, dim_, scores_ + at * kChunk);
        };
        auto add_values = [&](const Panels& panels, auto mr, int at, int blocks, auto ahead) {
            constexpr int MR = decltype(mr)::value;
            value_tile<F32, decltype(ahead)::value, MR>(probabilities_ + (int64_t)at * kChunk * Kv<F32>::kBytes, panels, blocks, dim_,
                                                        state.values + (int64_t)at * dim_, fresh);
        };
        if (!Wide && rows_per_head_ <= kFloatRows) {
            // One tile a head: the heads' latencies overlap.
            Panels panels[kAttentionRows];
            for (int i = 0; i < kv_heads_; ++i) {
                panels[i] = panels_of(i, both ? next.any() ? next : own : own.any() ? own : next);
                for_row_tiles<kFloatRows>(rows_per_head_, [&](auto mr, int) { score(panels[i], mr, i * rows_per_head_, blocks, std::true_type{}); });
            }
            soften_rows(0, rows_, blocks);
            for (int i = 0; i < kv_heads_; ++i)
                for_row_tiles<kFloatRows>(rows_per_head_, [&](auto mr, int) { add_values(panels[i], mr, i * rows_per_head_, blocks, std::true_type{}); });
            return;
        }
        auto tile = [&](const Panels& panels, auto mr, int at, int blocks, auto ahead) {
            score(panels, mr, at, blocks, ahead);
            soften_rows(at, mr, blocks);
            add_values(panels, mr, at, blocks, ahead);
        };
        for (int i = 0; i < kv_heads_; ++i) {
            const Panels panels = Wide ? widened(panels_of(i, both && next.any() ? next : own.any() ? own : next), blocks) : panels_of(i, {});
            for_row_tiles<kFloatRows>(rows_per_head_, [&](auto mr, int done) {
                const int at = i * rows_per_head_ + done;
                // What lies behind the last row's token adds nothing; where pieces are together, all lies before.
                const int most = positions_[at + mr - 1] < base ? 1 : (positions_[at + mr - 1] - base) / kBlock + 1;
                const int seen = most < blocks ? most : blocks;
                if (!Wide && both && done == 0 && next.any()) tile(panels_of(i, next), mr, at, seen, std::true_type{});
                else if (!Wide && both && done == kFloatRows && own.any()) tile(panels_of(i, own), mr, at, seen, std::true_type{});
                else tile(panels, mr, at, seen, std::false_type{});
            });
        }
    }

    // The panels as they are multiplied; their scales go to scales_.
    Panels widened(const Panels& stored, int blocks) {
        Panels p{};
        if constexpr (Wide) {
            const int64_t wide_bytes = (int64_t)dim_ * kBlock * Kv<F32>::kBytes;
            uint8_t* const v = wide_ + kChunkBlocks * wide_bytes;
            widen_panels(args_.kv, true, stored.k, stored.next_k, blocks, panel_bytes_ / kPanelRowBytes, wide_);
            widen_panels(args_.kv, false, stored.v, stored.next_v, blocks, panel_bytes_ / kPanelRowBytes, v);
            for (int b = 0; b < blocks; ++b) {
                p.k[b] = p.next_k[b] = wide_ + b * wide_bytes;
                p.v[b] = p.next_v[b] = v + b * wide_bytes;
                if (!kv_scaled(args_.kv)) continue;
                const uint16_t* scales = (const uint16_t*)(stored.v[b] + panel_bytes_);
                for (int t = 0; t < kBlock; ++t) {
                    scales_[b * kBlock + t] = bf16_value(scales[t]);
                    scales_[kChunk + b * kBlock + t] = bf16_value(scales[kBlock + t]);
                }
                __builtin_prefetch(stored.next_v[b] + panel_bytes_, 0, 2);
            }
        }
        return p;
    }

    const AttentionArgs& args_;
    const AttentionItem& item_;
    const int dim_, group_;
    const int64_t panel_bytes_, head_bytes_;  // as stored
    State span_, total_, kept_total_, kept_span_;
    float* scores_;
    uint8_t* probabilities_;
    float* scales_;   // [2][kChunk]: of keys, of values
    uint8_t* wide_;   // a chunk's keys and values as they are multiplied
    int head_ = 0, kv_heads_ = 0, rows_per_head_ = 0, rows_ = 0;
    const uint8_t* q_[kAttentionRows];
    int32_t positions_[kAttentionRows], row_token_[kAttentionRows], row_head_[kAttentionRows];
};

}  // namespace

void attention_item(const AttentionArgs& args, const AttentionItem& item, uint8_t* scratch) {
    if (args.kv == KvType::BF16) Work<false, false>(args, item, scratch).run();
    else if (args.kv == KvType::F32) Work<true, false>(args, item, scratch).run();
    else if (kv_arithmetic(args.kv) == Act::F32) Work<true, true>(args, item, scratch).run();
    else Work<false, true>(args, item, scratch).run();
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
        const vf inverse = splat(args.v_scale / with_sink(args, head, maximum, sum));
        for (int c = 0; c < dim; c += L) store(values + c, load<vf>(values + c) * inverse);
        if (args.kv == KvType::I4) rotate_head(values, dim);
        store_activations(args.out, token, 1, (int64_t)head * dim, dim, values, dim);
    }
}

}  // namespace octavo::OCTAVO_ISA
