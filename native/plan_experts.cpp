// Operations of a plan for mixtures of experts: routing, sorting rows by expert, and the products of each expert with its rows.
#include <algorithm>
#include <stdexcept>

#include "plan.h"

namespace octavo {

namespace {

void require(bool ok, const std::string& what) {
    if (!ok) throw std::invalid_argument(what);
}

// Tiles of rows there can be: each expert that has any has one that is not full at the most.
int64_t most_tiles(int64_t rows, int64_t experts) { return std::min(rows, std::min(rows, experts) + rows / kMaxRowTile); }

bool alike(const WeightView& a, const WeightView& b) {
    return a.form == b.form && a.columns == b.columns && a.k == b.k && a.group == b.group && a.zero == b.zero && a.rotation == b.rotation &&
           a.scale_f16 == b.scale_f16 && (a.minimums == nullptr) == (b.minimums == nullptr);
}

double stored_bytes(const WeightView& w) {
    return (double)(w.columns / kPanel * w.panel_bytes) + (double)(w.columns * w.groups * (w.scale_f16 ? 2 : 4)) * (w.minimums ? 2 : 1);
}

}  // namespace

const WeightView* Plan::keep_views(const Weights& weights) {
    weight_views_.push_back(std::make_unique<WeightView[]>(weights.size()));
    WeightView* views = weight_views_.back().get();
    for (size_t i = 0; i < weights.size(); ++i) {
        views[i] = weights[i]->view();
        weights_.push_back(weights[i]);
    }
    return views;
}

void Plan::add_route(std::string name, const Activation& logits, const RouteArgs& args, const std::vector<float>& correction,
                     const Activation& out) {
    require(args.experts >= 1 && args.experts <= kMaxExperts, name + ": " + std::to_string(args.experts) + " experts, 1 to " + std::to_string(kMaxExperts) + " can be chosen from");
    require(args.top_k >= 1 && args.groups >= 1 && args.top_groups >= 1 && args.top_groups <= args.groups && args.experts % args.groups == 0,
            name + ": groups of experts");
    const int size = args.experts / args.groups;
    require(args.top_k <= size * args.top_groups, name + ": more experts to choose than there are to choose from");
    require(!args.group_pairs || size >= 2, name + ": groups of one expert have no best two");
    require(correction.empty() || (int)correction.size() == args.experts, name + ": correction of each expert");
    require(logits.form == Act::F32 && logits.width >= args.experts && out.form == Act::F32 && out.width >= 2 * args.top_k, name + ": logits and choices are f32");
    const ActView from = view(logits, most_rows()), to = view(out, most_rows());
    auto& op = add(Kind::Route, std::move(name));
    op.route = args;
    op.route.logits = (const float*)from.data;
    op.route.logits_stride = logits.width;
    op.route.correction = keep(correction);
    op.route.out = (float*)to.data;
    op.route.out_stride = out.width;
}

void Plan::add_experts(std::string name, const Activation& route, int top_k, const Activation& x, const Weights& gate_up,
                       const std::vector<float>& gate_up_bias, Epilogue activation, float alpha, float limit, const Activation& hidden,
                       const Weights& down, const std::vector<float>& down_bias, bool add_to, const Activation& out, int64_t out_columns,
                       bool scale_inputs) {
    const int64_t rows = most_rows(), experts = (int64_t)gate_up.size();
    require(experts >= 1 && experts <= kMaxExperts && gate_up.size() == down.size(), name + ": as many gates as downs, 1 to " + std::to_string(kMaxExperts));
    require(top_k >= 1 && top_k <= experts, name + ": experts of a row");
    require(route.form == Act::F32 && route.width >= 2 * top_k, name + ": choices are f32");
    auto fits = [&](const Weights& weights, const Activation& in, const std::vector<float>& bias) {
        const WeightView& w = weights[0]->view();
        for (const auto& other : weights) require(alike(w, other->view()), name + ": experts have weights of one form and shape");
        require(in.form == activations_of(w.form), name + ": activations do not have the form that the weights need");
        require(in.width == w.k_padded && in.rotation == w.rotation, name + ": activations are not as wide as the weights, or not rotated alike");
        require(in.form != Act::I8 || w.group % in.group == 0, name + ": the weight group is no multiple of the activation group");
        require(in.form != Act::I8 || in.group <= 32 || (w.form == Form::W8 && !w.minimums), name + ": wide groups are of w8 without minimums");
        require(bias.empty() || (int64_t)bias.size() == experts * w.columns, name + ": biases are of all packed columns of all experts");
    };
    fits(gate_up, x, gate_up_bias);
    fits(down, hidden, down_bias);
    require(halves_columns(activation), name + ": an activation of gate and up");
    require(activation != Epilogue::ClampedSiluMul || (alpha > 0.0f && limit > 0.0f), name + ": alpha and limit must be positive");
    const WeightView &up = gate_up[0]->view(), &last = down[0]->view();
    require(hidden.width <= up.columns / 2, name + ": rows between the products are wider than the first gives");
    require(hidden.form != Act::I8 || hidden.width % hidden.group == 0, name + ": whole groups");
    require(out.form == Act::F32 && out_columns >= 1 && out_columns <= out.width && out_columns <= last.columns, name + ": output width");
    require(most_tiles(rows * top_k, experts) * ceil_div(up.columns, 2 * kPanel) >> ThreadPool::kTileBits == 0, name + ": more tiles than can be counted");
    ExpertsArgs a;
    a.route = (const float*)view(route, rows).data;
    a.route_stride = route.width;
    a.experts = (int)experts;
    a.top_k = top_k;
    a.list = &expert_list_;
    a.x = view(x, rows);
    a.scale_inputs = scale_inputs;
    a.gate_up = keep_views(gate_up);
    a.gate_up_bias = keep(gate_up_bias);
    a.activation = activation;
    a.alpha = alpha;
    a.limit = limit;
    a.hidden = view(hidden, rows * top_k);
    a.down = keep_views(down);
    a.down_bias = keep(down_bias);
    a.add = add_to;
    a.out = (float*)view(out, rows).data;
    a.out_stride = out.width;
    a.out_columns = out_columns;
    const auto room = [](auto& values, int64_t count) { values.resize(std::max(values.size(), (size_t)count)); };
    room(expert_rows_, rows * top_k);
    room(expert_weights_, rows * top_k);
    room(expert_ends_, experts);
    room(expert_tiles_, most_tiles(rows * top_k, experts));
    expert_list_ = {expert_rows_.data(), expert_weights_.data(), expert_tiles_.data(), 0};
    need_scratch(kMaxRowTile * (a.x.row_bytes() + (a.x.form == Act::I8 ? 12 * a.x.groups() : 0)));
    add(Kind::ExpertSort, name + ".sort").experts = a;
    add(Kind::ExpertGateUp, name).experts = a;
    add(Kind::ExpertDown, name + ".down").experts = a;
}

// Tiles of a step of `rows` rows. Those of gate and up are counted for the worst case, since rows are not yet routed; what is left over
// is claimed in vain.
int64_t Plan::prepare_experts(Operation& op, int64_t rows) {
    if (op.kind == Kind::ExpertSort) {
        op.experts.rows = rows;
        return 1;
    }
    if (op.kind == Kind::HeadLinear) {
        op.heads.rows = rows;
        op.heads.row_tile = (int)std::min<int64_t>(rows, kMaxRowTile);
        return ceil_div(rows, op.heads.row_tile) * op.heads.heads;
    }
    ExpertsArgs& a = op.experts;
    a.rows = rows;
    if (op.kind == Kind::ExpertGateUp) {
        // As wide as leaves each thread several tiles: for each its rows are gathered anew. A group of outputs lies inside one.
        const int64_t group = a.hidden.form == Act::I8 ? std::max(a.hidden.group, 2 * kPanel) : 2 * kPanel, least = 2 * group;
        const int64_t tiles = std::min<int64_t>(rows * a.top_k, a.experts), columns = a.gate_up[0].columns;
        a.column_tile = std::clamp<int64_t>(columns * tiles / (6 * threads()), least, std::max<int64_t>(512, least)) / least * least;
        a.column_tiles = ceil_div(columns, a.column_tile);
        return most_tiles(rows * a.top_k, a.experts) * a.column_tiles;
    }
    const int64_t columns = round_up(a.out_columns, kColumnTile);
    a.down_tile = columns / kColumnTile < 2 * threads() ? 2 * kPanel : kColumnTile;
    return columns / a.down_tile;
}

void Plan::sort_experts(const ExpertsArgs& a) {
    // Numbers outside are left out: they can only come from a route that no add_route made.
    auto each = [&](auto&& body) {
        for (int64_t r = 0; r < a.rows; ++r)
            for (int k = 0; k < a.top_k; ++k) {
                const float* route = a.route + r * a.route_stride;
                const float number = route[a.top_k + k];
                if (number >= 0.0f && number < (float)a.experts) body((int32_t)r, (size_t)number, route[k]);
            }
    };
    std::fill_n(expert_ends_.begin(), a.experts, 0);
    each([&](int32_t, size_t expert, float) { ++expert_ends_[expert]; });
    int32_t at = 0;
    ExpertList& list = expert_list_;
    list.tile_count = 0;
    for (int32_t e = 0; e < a.experts; ++e) {
        const int32_t count = expert_ends_[(size_t)e], end = at + count;
        expert_ends_[(size_t)e] = at;
        if (count == 0) continue;
        const int32_t tiles = (int32_t)ceil_div(count, kMaxRowTile), each_rows = (int32_t)ceil_div(count, tiles);
        for (; at < end; at = std::min(at + each_rows, end)) list.tiles[list.tile_count++] = {e, at, std::min(at + each_rows, end)};
    }
    each([&](int32_t row, size_t expert, float weight) {
        const size_t place = (size_t)expert_ends_[expert]++;
        list.row[place] = row;
        list.weight[place] = weight;
    });
}

// Of experts, the weights that were read; of the linears of heads, all of them.
void Plan::count_experts(const Operation& op, OperationProfile& entry) const {
    if (op.kind == Kind::HeadLinear) {
        const WeightView& w = op.heads.w[0];
        entry.bytes += op.heads.heads * stored_bytes(w);
        entry.operations += 2.0 * (double)op.heads.rows * op.heads.heads * (double)(w.columns * w.k_padded);
    }
    if (op.kind != Kind::ExpertGateUp && op.kind != Kind::ExpertDown) return;
    const WeightView& w = op.kind == Kind::ExpertDown ? op.experts.down[0] : op.experts.gate_up[0];
    for (int64_t t = 0; t < expert_list_.tile_count; ++t) {
        const ExpertTile& tile = expert_list_.tiles[t];
        if (t == 0 || expert_list_.tiles[t - 1].expert != tile.expert) entry.bytes += stored_bytes(w);
        entry.operations += 2.0 * (tile.end - tile.begin) * (double)(w.columns * w.k_padded);
    }
}

}  // namespace octavo
