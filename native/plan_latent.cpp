// Operations of a plan for multi-head latent attention: linears of single heads, and the append of latents to the KV pool.
#include <stdexcept>

#include "plan.h"

namespace octavo {

namespace {

void require(bool ok, const std::string& what) {
    if (!ok) throw std::invalid_argument(what);
}

}  // namespace

void Plan::add_head_linear(std::string name, const Weights& weights, const Activation& in, int64_t in_first, int64_t in_step,
                           const Activation& out, int64_t out_first, int64_t out_step) {
    require(!weights.empty() && weights.size() <= kMaxExperts, name + ": heads");
    const WeightView& w = weights[0]->view();
    const int64_t last = (int64_t)weights.size() - 1, columns = weights[0]->real_columns();
    for (const auto& other : weights)
        require(other->view().form == w.form && other->view().k == w.k && other->real_columns() == columns, name + ": the weights of heads are alike");
    require((w.form == Form::F32 && in.form == Act::F32) || (w.form == Form::BF16 && in.form == Act::BF16), name + ": linears of heads are f32 or bf16");
    // What a tile reads and writes of a head must not reach into the next.
    require(w.k == w.k_padded && columns == w.columns, name + ": heads of a k that is a multiple of 32 and columns that are one of 64");
    auto inside = [](const Activation& a, int64_t first, int64_t step, int64_t last_head, int64_t width) {
        return first >= 0 && step >= width && step < (int64_t{1} << 31) && first + last_head * step + width <= a.width;
    };
    require(inside(in, in_first, in_step, last, w.k) && inside(out, out_first, out_step, last, columns), name + ": columns of heads");
    require(in_first % 2 == 0 && in_step % 2 == 0, name + ": heads begin at even columns");
    require(out.form != Act::I8 || (columns % out.group == 0 && out_first % out.group == 0 && out_step % out.group == 0), name + ": groups lie inside a head");
    const ActView from = view(in, most_rows()), to = view(out, most_rows());
    auto& op = add(Kind::HeadLinear, std::move(name));
    op.heads.w = keep_views(weights);
    op.heads.heads = (int)weights.size();
    op.heads.in = from;
    op.heads.out = to;
    op.heads.in_first = in_first;
    op.heads.in_step = in_step;
    op.heads.out_first = out_first;
    op.heads.out_step = out_step;
    op.heads.columns = columns;
}

void Plan::add_latent(std::string name, int layer, const Activation& q, const Activation& kv, const LatentArgs& args, int tables,
                      const std::vector<float>& norm, const Activation& q_out) {
    require(!in_head_ && !kv_, "attention is part of the body, and added before the pool is made");
    const int dim = args.rank + args.rope_dim;
    require(args.heads >= 1 && args.rank >= 32 && args.rank % 32 == 0 && args.rope_dim >= 16 && args.rope_dim % 16 == 0 && dim <= kMaxHeadDim,
            name + ": a latent of a multiple of 32 and a rotated part of a multiple of 16, together up to " + std::to_string(kMaxHeadDim));
    require(q.form == Act::F32 && args.q_first >= 0 && args.q_step >= args.rope_dim && args.q_step < (int64_t{1} << 31) &&
                args.q_first + (args.heads - 1) * args.q_step + args.rope_dim <= q.width, name + ": rotated parts of the queries");
    require(kv.form == Act::F32 && args.kv_first >= 0 && args.kv_first + dim <= kv.width && (int)norm.size() == args.rank, name + ": latent, and the weight of its norm");
    require(q_out.form != Act::I8 && q_out.width == (int64_t)args.heads * dim, name + ": queries are f32 or bf16");
    require(tables >= 0 && tables < (int)rope_tables_.size() && rope_tables_[(size_t)tables].values >= limits_.table_stride * kBlock * args.rope_dim / 2,
            name + ": the rope tables are shorter than the block table");
    require(layer >= 0 && layer < 8192, "layer " + std::to_string(layer));
    require(layers_ == 0 || (kv_heads_ == 1 && head_dim_ == dim), "all layers have the same kv heads and head size");
    for (const auto& other : body_) require(other.kind != Kind::Latent || other.rope.q_form == q_out.form, "all layers have the same form of queries");
    const ActView queries = view(q, limits_.max_tokens), latents = view(kv, limits_.max_tokens), to = view(q_out, limits_.max_tokens);
    auto& op = add(Kind::Latent, std::move(name));
    op.latent = args;
    op.latent.q = (const float*)queries.data;
    op.latent.q_stride = q.width;
    op.latent.kv = (const float*)latents.data;
    op.latent.kv_stride = kv.width;
    op.latent.norm = keep(norm);
    op.rope.kv_heads = 1;
    op.rope.q_heads = args.heads;
    op.rope.head_dim = dim;
    op.rope.cos = rope_tables_[(size_t)tables].cos;
    op.rope.sin = rope_tables_[(size_t)tables].sin;
    op.rope.positions = positions_.data();
    op.rope.slots = slots_.data();
    op.rope.q_form = q_out.form;
    op.rope.q_out = to.data;
    kv_heads_ = 1;
    head_dim_ = dim;
    op.layer = layer;
    layers_ = std::max(layers_, layer + 1);
}

}  // namespace octavo
