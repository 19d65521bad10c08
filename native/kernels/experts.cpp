// Mixtures of experts: the choice of experts for a row, and the products of experts with the rows that chose them.
// A row's products are those of the linear kernels, which do not depend on what other rows an expert has, and they are added up in the
// order of experts: a row's result does not depend on the batch.
#include "experts.h"

#include "gemm.h"
#include "kernels.h"

namespace octavo::OCTAVO_ISA {
namespace {

// The scores of whole vectors of experts; those past the last are 0.
void softmax(const float* x, int n, float* out) {
    alignas(64) float last[L];
    auto part = [&](int c, float filler) {
        if (c + L <= n) return load<vf>(x + c);
        for (int i = 0; i < L; ++i) last[i] = c + i < n ? x[c + i] : filler;
        return load<vf>(last);
    };
    vf largest = splat(-__builtin_inff());
    for (int c = 0; c < n; c += L) largest = vmax(largest, part(c, -__builtin_inff()));
    const vf maximum = max_everywhere(largest);
    vf sums = {};
    for (int c = 0; c < n; c += L) {
        const vf e = vexp(part(c, -__builtin_inff()) - maximum);
        sums += e;
        store(out + c, e);
    }
    const vf sum = splat(sum_lanes(sums));
    for (int c = 0; c < n; c += L) store(out + c, load<vf>(out + c) / sum);
}

void sigmoid(const float* x, int n, float* out) {
    alignas(64) float last[L] = {};
    for (int c = 0; c < n; c += L) {
        if (c + L > n) __builtin_memcpy(last, x + c, (size_t)(n - c) * 4);
        const vf v = c + L <= n ? load<vf>(x + c) : load<vf>(last);
        store(out + c, splat(1.0f) / (splat(1.0f) + vexp(-v)));
    }
}

// The index of the largest open value, the first of equal ones; one that is open whatever the values are, NaN among them.
int best_open(const float* values, const bool* open, int begin, int end) {
    int best = -1;
    for (int i = begin; i < end; ++i)
        if (open[i] && (best < 0 || values[i] > values[best])) best = i;
    return best;
}

// Closes the experts of all groups but the best.
void close_groups(const RouteArgs& args, const float* choice, bool* open) {
    const int size = args.experts / args.groups;
    float worth[kMaxExperts];
    bool waiting[kMaxExperts];
    for (int g = 0; g < args.groups; ++g) {
        const int begin = g * size, end = begin + size, first = best_open(choice, open, begin, end);
        worth[g] = choice[first];
        if (args.group_pairs) {
            open[first] = false;
            worth[g] += choice[best_open(choice, open, begin, end)];
            open[first] = true;
        }
        waiting[g] = true;
    }
    for (int i = 0; i < args.top_groups; ++i) waiting[best_open(worth, waiting, 0, args.groups)] = false;
    for (int g = 0; g < args.groups; ++g)
        for (int e = g * size; waiting[g] && e < (g + 1) * size; ++e) open[e] = false;
}

// The view from a row on.
ActView rows_from(const ActView& v, int64_t row) {
    ActView from = v;
    from.data += row * v.row_bytes();
    if (v.form == Act::I8) {
        from.scales += row * v.groups();
        from.scaled_sums += row * v.groups();
        from.sums += row * v.groups();
    }
    return from;
}

// A row of f32 or bf16 times a number.
void copy_scaled(const ActView& v, const uint8_t* from, float factor, uint8_t* to) {
    const vf f = splat(factor);
    if (v.form == Act::F32) {
        for (int64_t c = 0; c < v.width; c += L) store(to + c * 4, load<vf>(from + c * 4) * f);
        return;
    }
    for (int64_t c = 0; c < v.width; c += L) {
        alignas(64) float values[L];
        for (int i = 0; i < L; ++i) {
            uint16_t bits;
            __builtin_memcpy(&bits, from + (c + i) * 2, 2);
            values[i] = bf16_value(bits);
        }
        store_bf16(to + c * 2, load<vf>(values) * f);
    }
}

// The rows of a list one after the other: where they lie if they do, else copied to scratch; each times its factor, if there are any.
ActView gather(const ActView& v, const int32_t* rows, const float* factors, int count, uint8_t* scratch) {
    bool together = factors == nullptr;
    for (int i = 1; i < count; ++i) together &= rows[i] == rows[0] + i;
    if (together) return rows_from(v, rows[0]);
    ActView to = v;
    const size_t row_bytes = (size_t)v.row_bytes(), group_bytes = v.form == Act::I8 ? (size_t)v.groups() * 4 : 0;
    to.data = scratch;
    to.scales = (float*)(scratch + count * row_bytes);
    to.scaled_sums = to.scales + count * v.groups();
    to.sums = (int32_t*)(to.scaled_sums + count * v.groups());
    for (int i = 0; i < count; ++i) {
        const uint8_t* row = v.data + rows[i] * row_bytes;
        if (factors && v.form != Act::I8) copy_scaled(v, row, factors[i], to.data + i * row_bytes);
        else __builtin_memcpy(to.data + i * row_bytes, row, row_bytes);
        if (group_bytes == 0) continue;
        const int64_t from = rows[i] * v.groups(), at = i * v.groups();
        __builtin_memcpy(to.scales + at, v.scales + from, group_bytes);
        __builtin_memcpy(to.scaled_sums + at, v.scaled_sums + from, group_bytes);
        __builtin_memcpy(to.sums + at, v.sums + from, group_bytes);
        for (int64_t g = at; factors && g < at + v.groups(); ++g) {
            to.scales[g] *= factors[i];
            to.scaled_sums[g] *= factors[i];
        }
    }
    return to;
}

}  // namespace

void route_row(const RouteArgs& args, int64_t row) {
    const float* logits = args.logits + row * args.logits_stride;
    float* weights = args.out + row * args.out_stride;
    float* numbers = weights + args.top_k;
    alignas(64) float scores[kMaxExperts + L], choice[kMaxExperts];
    bool open[kMaxExperts];
    switch (args.scoring) {
        case Scoring::Softmax: softmax(logits, args.experts, scores); break;
        case Scoring::Sigmoid: sigmoid(logits, args.experts, scores); break;
        case Scoring::SoftmaxOfChosen: __builtin_memcpy(scores, logits, (size_t)args.experts * 4); break;
    }
    for (int e = 0; e < args.experts; ++e) {
        choice[e] = args.correction ? scores[e] + args.correction[e] : scores[e];
        open[e] = true;
    }
    if (args.top_groups < args.groups) close_groups(args, choice, open);
    float sum = 1e-20f;  // as DeepSeek-V3 has it, where all scores may be next to nothing
    for (int k = 0; k < args.top_k; ++k) {
        const int e = best_open(choice, open, 0, args.experts);
        open[e] = false;
        numbers[k] = (float)e;
        weights[k] = scores[e];
        sum += scores[e];
    }
    if (args.scoring == Scoring::SoftmaxOfChosen) {
        softmax(weights, args.top_k, scores);
        __builtin_memcpy(weights, scores, (size_t)args.top_k * 4);
    }
    for (int k = 0; k < args.top_k; ++k) weights[k] = (args.renormalize ? weights[k] / sum : weights[k]) * args.scale;
}

void expert_gate_up(const ExpertsArgs& args, int64_t index, uint8_t* scratch) {
    const ExpertList& list = *args.list;
    if (index / args.column_tiles >= list.tile_count) return;
    const ExpertTile tile = list.tiles[index / args.column_tiles];
    const int rows = tile.end - tile.begin;
    LinearArgs linear;
    linear.w = args.gate_up[tile.expert];
    linear.a = gather(args.x, list.row + tile.begin, args.scale_inputs ? list.weight + tile.begin : nullptr, rows, scratch);
    linear.rows = linear.row_tile = rows;
    linear.bias = args.gate_up_bias ? args.gate_up_bias + tile.expert * linear.w.columns : nullptr;
    linear.epilogue = args.activation;
    linear.alpha = args.alpha;
    linear.limit = args.limit;
    linear.out = rows_from(args.hidden, tile.begin);
    linear.out_columns = args.hidden.width;
    linear.column_tile = (int)args.column_tile;
    linear.row_tiles = 1;
    linear.column_tiles = args.column_tiles;
    linear_tile(linear, index % args.column_tiles);
}

void expert_down(const ExpertsArgs& args, int64_t index) {
    const int64_t column = index * args.down_tile, room = args.out_columns - column;
    const int width = (int)(room < args.down_tile ? room : args.down_tile);
    if (width <= 0) return;
    if (!args.add)
        for (int64_t r = 0; r < args.rows; ++r) __builtin_memset(args.out + r * args.out_stride + column, 0, (size_t)width * 4);
    const ExpertList& list = *args.list;
    alignas(64) float products[kMaxRowTile * kColumnTile];
    LinearArgs linear;
    linear.a = args.hidden;
    for (int64_t t = 0; t < list.tile_count; ++t) {
        const ExpertTile tile = list.tiles[t];
        linear.w = args.down[tile.expert];
        Ahead ahead(linear.w, column, 0, 1, false);
        gemm(linear, tile.begin, tile.end - tile.begin, column, (int)args.down_tile, products, ahead);
        const float* bias = args.down_bias ? args.down_bias + tile.expert * linear.w.columns + column : nullptr;
        for (int i = tile.begin; i < tile.end; ++i) {
            float* product = products + (i - tile.begin) * kColumnTile;
            float* out = args.out + list.row[i] * args.out_stride + column;
            if (bias)
                for (int c = 0; c < args.down_tile; c += L) store(product + c, load<vf>(product + c) + load<vf>(bias + c));
            const vf weight = splat(args.scale_inputs ? 1.0f : list.weight[i]);
            int c = 0;
            for (; c + L <= width; c += L) store(out + c, fma(weight, load<vf>(product + c), load<vf>(out + c)));
            if (c < width) {
                alignas(64) float last[L] = {};
                __builtin_memcpy(last, out + c, (size_t)(width - c) * 4);
                store(last, fma(weight, load<vf>(product + c), load<vf>(last)));
                __builtin_memcpy(out + c, last, (size_t)(width - c) * 4);
            }
        }
    }
}

}  // namespace octavo::OCTAVO_ISA
