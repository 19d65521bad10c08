// Building and running plans.
#include "plan.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "sampler.h"

namespace octavo {

namespace {

constexpr int kMaxOperations = 8192;
constexpr int64_t kPartialSlots = 8192;
constexpr int64_t kMaxWidth = int64_t{1} << 30;
constexpr int64_t kMaxTokens = 1 << 23;  // a step's tiles have to be counted in 24 bits

void require(bool ok, const std::string& what) {
    if (!ok) throw std::invalid_argument(what);
}

}  // namespace

Plan::Plan(const std::string& level, int threads, const StepLimits& limits, int64_t arena_bytes)
    : kernels_(kernel_table(level)), limits_(limits), arena_((size_t)std::max<int64_t>(arena_bytes, 64)),
      pool_(threads, kMaxOperations) {
    require(limits.max_tokens <= kMaxTokens && limits.max_sequences <= kMaxTokens && limits.table_stride <= kMaxTokens &&
                limits.head_rows <= kMaxTokens && limits.max_sequences * limits.table_stride <= int64_t{1} << 36,
            "the limits of a step are too large");
    tokens.resize((size_t)limits.max_tokens);
    starts.resize((size_t)limits.max_sequences);
    counts.resize((size_t)limits.max_sequences);
    block_tables.resize((size_t)(limits.max_sequences * limits.table_stride));
    logit_rows.resize((size_t)limits.max_tokens);
    positions_.resize((size_t)limits.max_tokens);
    slots_.resize((size_t)limits.max_tokens);
}

Plan::~Plan() = default;

ActView Plan::view(const Activation& a, int64_t rows) const {
    auto inside = [&](int64_t offset, int64_t bytes) {
        require(offset >= 0 && offset % 4 == 0 && bytes >= 0 && bytes <= (int64_t)arena_.size() - offset,
                "a value of " + std::to_string(bytes) + " bytes at offset " + std::to_string(offset) + " is unaligned or outside the arena of " +
                    std::to_string(arena_.size()) + " bytes");
        return arena_.data() + offset;
    };
    require(a.width >= 1 && a.width <= kMaxWidth, "a value of width " + std::to_string(a.width));
    ActView v;
    v.form = a.form;
    v.width = a.width;
    v.group = a.group;
    v.data = inside(a.data, Activation::row_bytes(a.form, a.width) * rows);
    if (a.form == Act::I8) {
        require(a.group == 16 || a.group == 32 || (a.group >= 64 && a.group % 64 == 0 && a.group <= kMaxActGroup),
                "int8 activations have groups of 16, 32 or a multiple of 64 up to 256");
        require(a.width % kKPad == 0 && a.width % a.group == 0, "int8 activations are padded to 32 and to whole groups");
        require(a.rotation == 0 || a.rotation == 32 || a.rotation == 64, "activations are rotated in blocks of 32 or 64");
        require(a.rotation == 0 || a.group % a.rotation == 0, "a group of activations is whole rotated blocks");
        v.rotation = a.rotation;
        const int64_t bytes = a.width / a.group * rows * 4;
        v.scales = (float*)inside(a.scales, bytes);
        v.scaled_sums = (float*)inside(a.scaled_sums, bytes);
        v.sums = (int32_t*)inside(a.sums, bytes);
    }
    return v;
}

const float* Plan::keep(const std::vector<float>& values, int64_t padded) {
    return values.empty() ? nullptr : keep(values.data(), values.size(), std::max(values.size(), (size_t)padded));
}

const float* Plan::keep(const float* values, size_t size, size_t padded) {
    constants_.push_back(std::make_unique<float[]>(padded));
    std::memcpy(constants_.back().get(), values, size * 4);
    return constants_.back().get();
}

Plan::Operation& Plan::add(Kind kind, std::string name) {
    require((int)(body_.size() + head_.size()) + 2 < kMaxOperations, "a plan has too many operations");
    auto& list = in_head_ ? head_ : body_;
    list.emplace_back();
    list.back().kind = kind;
    list.back().name = std::move(name);
    return list.back();
}

void Plan::begin_head() { in_head_ = true; }

void Plan::set_logits(const Activation& logits) {
    require(logits.form == Act::F32 && logits.width >= limits_.vocab, "logits are f32 and as wide as the vocabulary");
    view(logits, limits_.head_rows);
    require(in_head_ && logits_.width == 0, "set_logits ends the head, once");
    logits_ = logits;
    add(Kind::Sample, "sample");
}

void Plan::add_embed(std::string name, std::shared_ptr<PackedWeight> weight, const Activation& out, float scale, bool positions,
                     int64_t offset) {
    require(out.form == Act::F32 && out.width >= weight->view().k, "an embedding writes f32 rows as wide as the weight");
    require(offset >= 0 && offset <= kMaxTokens && (positions || offset == 0), "offset of an embedding: " + std::to_string(offset));
    const int64_t rows_read = positions ? limits_.table_stride * kBlock + offset : bidirectional_ ? 1 : limits_.vocab;
    require(rows_read <= weight->view().columns, "the embedding has fewer rows than there are tokens or positions");
    require(!in_head_, "an embedding is not part of the head");
    if (!positions) known_tokens_ = known_tokens_ == 0 ? weight->real_columns() : std::min(known_tokens_, weight->real_columns());
    const ActView rows = view(out, limits_.max_tokens);
    auto& op = add(Kind::Embed, std::move(name));
    op.embed = {weight->view(), positions ? positions_.data() : tokens.data(), offset, (float*)rows.data, out.width, scale};
    weights_.push_back(std::move(weight));
}

void Plan::add_norm(std::string name, const Activation& x, int64_t width, const std::vector<float>& weight,
                    const std::vector<float>& bias, float eps, bool layer, const Activation& out, bool gather,
                    const std::vector<int32_t>& order) {
    const int64_t rows = in_head_ ? limits_.head_rows : limits_.max_tokens;
    require(x.form == Act::F32 && width >= 1 && width <= x.width, "a norm reads f32");
    require(weight.empty() || (int64_t)weight.size() == width, "norm weight width");
    require(bias.empty() || (int64_t)bias.size() == width, "norm bias width");
    require(out.width >= width && out.width % kKPad == 0, "a norm writes rows padded to 32");
    require(!gather || in_head_, "only the head gathers rows");
    require(order.empty() || (weight.empty() && (int64_t)order.size() == width), "only a conversion reorders a row, all of it");
    for (const int32_t place : order)
        require(place >= 0 && place < width, "element " + std::to_string(place) + " of an order is outside the row");
    const ActView from = view(x, gather ? limits_.max_tokens : rows), to = view(out, rows);
    auto& op = add(Kind::Norm, std::move(name));
    op.norm.x = (const float*)from.data;
    op.norm.x_stride = x.width;
    op.norm.gather = gather ? logit_rows.data() : nullptr;
    op.norm.width = width;
    op.norm.weight = keep(weight);
    op.norm.bias = keep(bias);
    op.norm.eps = eps;
    op.norm.layer = layer;
    op.norm.out = to;
    if (!order.empty()) {
        orders_.push_back(std::make_unique<int32_t[]>(order.size()));
        std::copy(order.begin(), order.end(), orders_.back().get());
        op.norm.order = orders_.back().get();
    }
}

void Plan::add_linear(std::string name, std::shared_ptr<PackedWeight> weight, const Activation& in, const std::vector<float>& bias,
                      Epilogue epilogue, const Activation& out, int64_t out_columns) {
    const int64_t rows = in_head_ ? limits_.head_rows : limits_.max_tokens;
    const WeightView& w = weight->view();
    require(in.form == activations_of(w.form), name + ": activations do not have the form that the weight needs");
    require(in.width == w.k_padded, name + ": activations are " + std::to_string(in.width) + " wide, the weight's padded k is " + std::to_string(w.k_padded));
    require(in.form != Act::I8 || w.group % in.group == 0, name + ": the weight group is no multiple of the activation group");
    require(in.rotation == w.rotation, name + ": weight and activations are not rotated alike");
    require(in.form != Act::I8 || in.group <= 32 || (w.form == Form::W8 && !w.minimums), name + ": wide groups are of w8 without minimums");
    const bool halves = halves_columns(epilogue);
    const int64_t columns = halves ? w.columns / 2 : w.columns;
    require(out_columns >= 1 && out_columns <= columns && out_columns <= out.width, name + ": output width");
    require(epilogue != Epilogue::Add || out.form == Act::F32, name + ": a residual is f32");
    require(out.form == Act::F32 || out.width % kKPad == 0, name + ": output rows are padded to 32");
    // Columns past the packed ones would stay unwritten.
    require(out.form == Act::F32 || out.width <= columns, name + ": output row wider than the packed columns");
    require(bias.empty() || (int64_t)bias.size() <= w.columns, name + ": bias width");
    const ActView from = view(in, rows), to = view(out, rows);
    auto& op = add(Kind::Linear, std::move(name));
    op.linear.w = w;
    op.linear.a = from;
    op.linear.bias = keep(bias, w.columns);
    op.linear.epilogue = epilogue;
    op.linear.out = to;
    op.linear.out_columns = out_columns;
    weights_.push_back(std::move(weight));
}

int Plan::add_rope_tables(const float* cos, const float* sin, int64_t values) {
    require(values >= 1, "rope tables are empty");
    rope_tables_.push_back({keep(cos, (size_t)values, (size_t)values), keep(sin, (size_t)values, (size_t)values), values});
    return (int)rope_tables_.size() - 1;
}

int Plan::add_query_factors(const std::vector<float>& factors) {
    require(!factors.empty(), "there are no factors of queries");
    query_factors_.emplace_back(keep(factors), factors.size());
    return (int)query_factors_.size() - 1;
}

void Plan::add_rope(std::string name, const Activation& qkv, int layer, int q_heads, int kv_heads, int head_dim, int rope_dim, int tables,
                    const std::vector<float>& q_norm, const std::vector<float>& k_norm, float norm_eps, const Activation& q,
                    bool norm_layer, bool wide_norms, bool norm_after, int factors) {
    require(!in_head_ && !kv_, "attention is part of the body, and added before the pool is made");
    require(head_dim >= 16 && head_dim % 16 == 0 && head_dim <= kMaxHeadDim, "head size " + std::to_string(head_dim) + " is not a multiple of 16 up to " + std::to_string(kMaxHeadDim));
    require(rope_dim >= 0 && rope_dim % 2 == 0 && rope_dim <= head_dim, "rope size");
    require(q_heads >= 1 && kv_heads >= 1 && q_heads % kv_heads == 0, "query heads are a multiple of kv heads");
    require(qkv.form == Act::F32 && qkv.width >= (int64_t)(q_heads + 2 * kv_heads) * head_dim, "qkv width");
    const int64_t positions = limits_.table_stride * kBlock;
    require(rope_dim == 0 || (tables >= 0 && tables < (int)rope_tables_.size()), "there are no rope tables " + std::to_string(tables));
    require(rope_dim == 0 || rope_tables_[(size_t)tables].values >= positions * rope_dim / 2,
            "the rope tables are shorter than the block table");
    auto norm_fits = [&](const std::vector<float>& norm, int heads) {
        if (norm.empty()) return true;
        return (int64_t)norm.size() == (int64_t)heads * head_dim || (!wide_norms && (int64_t)norm.size() == head_dim);
    };
    require(norm_fits(q_norm, q_heads), "q norm width");
    require(norm_fits(k_norm, kv_heads), "k norm width");
    require(!wide_norms || !(norm_after || norm_layer), "an RMS norm over all heads comes before the rotation");
    require(!norm_layer || !norm_after, "a layer norm comes before the rotation");
    require(factors < (int)query_factors_.size(), "there are no factors " + std::to_string(factors) + " of queries");
    require(factors < 0 || (int64_t)query_factors_[(size_t)factors].second >= positions, "the factors of queries are fewer than positions");
    require(q.form != Act::I8 && q.width == (int64_t)q_heads * head_dim, "queries are f32 or bf16");
    require(layer >= 0 && layer < kMaxOperations, "layer " + std::to_string(layer));
    require(layers_ == 0 || (kv_heads == kv_heads_ && head_dim == head_dim_), "all layers have the same kv heads and head size");
    for (const auto& other : body_) require(other.kind != Kind::Rope || other.rope.q_form == q.form, "all layers have the same form of queries");
    const ActView from = view(qkv, limits_.max_tokens), to = view(q, limits_.max_tokens);
    auto& op = add(Kind::Rope, std::move(name));
    RopeArgs& r = op.rope;
    r.qkv = (const float*)from.data;
    r.stride = qkv.width;
    r.q_heads = q_heads;
    r.kv_heads = kv_heads;
    r.head_dim = head_dim;
    r.rope_dim = rope_dim;
    if (rope_dim > 0) r.cos = rope_tables_[(size_t)tables].cos, r.sin = rope_tables_[(size_t)tables].sin;
    r.q_norm = keep(q_norm);
    r.k_norm = keep(k_norm);
    r.q_norm_stride = (int64_t)q_norm.size() > head_dim ? head_dim : 0;
    r.k_norm_stride = (int64_t)k_norm.size() > head_dim ? head_dim : 0;
    r.norm_eps = norm_eps;
    r.norm_layer = norm_layer;
    r.wide_norms = wide_norms;
    r.norm_after = norm_after;
    if (factors >= 0) r.q_factors = query_factors_[(size_t)factors].first;
    r.positions = positions_.data();
    r.slots = slots_.data();
    r.q_out = to.data;
    r.q_form = q.form;
    kv_heads_ = kv_heads;
    head_dim_ = head_dim;
    op.layer = layer;
    layers_ = std::max(layers_, layer + 1);
}

void Plan::set_bidirectional() {
    require(work_.empty(), "what attention sees is said before the first of it is added");
    bidirectional_ = true;
    ends_.resize(positions_.size());
}

void Plan::add_attention(std::string name, const Activation& q, int layer, int q_heads, int kv_heads, int head_dim, float scale,
                         float softcap, int window, const Activation& out, const std::vector<float>& slopes, bool chunked,
                         const std::vector<float>& sinks) {
    require(!in_head_ && !kv_, "attention is part of the body, and added before the pool is made");
    require(q_heads >= 1 && kv_heads >= 1 && q_heads % kv_heads == 0 && head_dim >= 16 && head_dim % 16 == 0 && head_dim <= kMaxHeadDim,
            "head shape");
    require(q.form != Act::I8 && q.width == (int64_t)q_heads * head_dim, "queries are f32 or bf16");
    require(out.form == Act::F32 ? out.width >= (int64_t)q_heads * head_dim : head_dim % kKPad == 0 && out.width == (int64_t)q_heads * head_dim,
            "attention writes f32, or another form of heads that are a multiple of 32 wide");
    require(out.form != Act::I8 || head_dim % out.group == 0, "attention writes int8 in groups that lie inside a head");
    require(!chunked || window >= 1, "chunks of attention have a size");
    require(window >= 0 && softcap >= 0.0f && scale > 0.0f, "a window or soft cap below 0, or a scale not above it");
    require(slopes.empty() || ((int64_t)slopes.size() == q_heads && softcap == 0.0f), "ALiBi slopes: one for each query head, and no soft cap");
    require(layer >= 0 && layer < layers_, "attention of a layer that no rope operation fills");
    require(sinks.empty() || (int)sinks.size() == q_heads, "there is one sink for each query head");
    require(kv_heads == kv_heads_ && head_dim == head_dim_, "attention reads the heads that the rope operations write");
    for (const auto& other : body_)
        require((other.kind != Kind::Rope && other.kind != Kind::Latent) || other.rope.q_form == q.form, "attention reads the form that the rope operations write");
    const ActView from = view(q, limits_.max_tokens), to = view(out, limits_.max_tokens);
    auto& op = add(Kind::Attention, name);
    AttentionArgs& a = op.attention;
    a.q = from.data;
    a.q_form = q.form;
    a.q_heads = q_heads;
    a.kv_heads = kv_heads;
    a.head_dim = head_dim;
    a.scale = scale;
    a.softcap = softcap;
    a.window = window;
    a.chunked = chunked;
    // Scores are scaled after the slopes are added to them.
    std::vector<float> raised = slopes;
    for (float& slope : raised) slope /= scale;
    a.slopes = keep(raised);
    a.positions = (bidirectional_ ? ends_ : positions_).data();
    a.block_tables = block_tables.data();
    a.table_stride = limits_.table_stride;
    a.out = to;
    a.sinks = keep(sinks);
    op.layer = layer;
    partials_.resize(std::max(partials_.size(), (size_t)(kPartialSlots * (head_dim + 2))));
    const AttentionArgs args = a;
    auto& merge = add(Kind::Merge, std::move(name) + ".merge");
    merge.attention = args;
    merge.layer = layer;
    work_list(args);
}

void Plan::add_elementwise(std::string name, Elementwise kind, const Activation& a, const Activation* b, int64_t width, float scalar,
                           const Activation& out) {
    const int64_t rows = in_head_ ? limits_.head_rows : limits_.max_tokens;
    const bool gate = kind == Elementwise::SigmoidGate, two = gate || kind == Elementwise::Add || kind == Elementwise::SiluMul || kind == Elementwise::GeluMul || kind == Elementwise::GeluTanhMul;
    require(a.form == Act::F32 && out.form == Act::F32 && width >= 1 && width <= a.width && width <= out.width, "elementwise operations are f32");
    require(two == (b != nullptr) && (!b || (b->form == Act::F32 && (gate || width <= b->width))), "second operand");
    require((kind != Elementwise::Softcap && kind != Elementwise::Clip) || scalar > 0.0f, "soft cap and limit must be positive");
    const ActView first = view(a, rows), second = b ? view(*b, rows) : ActView{}, to = view(out, rows);
    auto& op = add(Kind::Elementwise, std::move(name));
    op.elementwise.kind = kind;
    op.elementwise.a = (const float*)first.data;
    op.elementwise.a_stride = a.width;
    if (b) op.elementwise.b = (const float*)second.data, op.elementwise.b_stride = b->width;
    op.elementwise.width = width;
    op.elementwise.scalar = scalar;
    op.elementwise.out = (float*)to.data;
    op.elementwise.out_stride = out.width;
}

void Plan::make_pool(int64_t blocks, KvType kv, const std::vector<float>& scales) {
    require(blocks >= 1 && blocks <= INT32_MAX / kBlock && layers_ > 0, "a pool needs blocks and a layer with attention");
    require(!kv_, "a plan has one pool");
    auto appends = [](const Operation& op) { return op.kind == Kind::Rope || op.kind == Kind::Latent; };
    require((int)kv >= 0 && (int)kv < kKvTypes, "KV type " + std::to_string((int)kv));
    for (const auto& op : body_)
        require((!appends(op) || op.rope.q_form == kv_arithmetic(kv)) && (op.kind != Kind::Attention || op.attention.q_form == kv_arithmetic(kv)),
                "queries are f32 where keys are f32 or f16, else bf16");
    require(kv != KvType::I4 || head_dim_ % 32 == 0, "keys and values of 4 bits need heads of a multiple of 32");
    require(scales.empty() || kv == KvType::E4M3 || kv == KvType::E5M2, "scales given beforehand are for fp8");
    require(scales.empty() || (int)scales.size() == 2 * layers_, "scales are two for each layer, of its keys and of its values");
    for (float scale : scales) require(scale >= 1e-30f && scale <= 1e30f, "a scale of keys or values is " + std::to_string(scale));
    for (const auto& op : body_) require(kv != KvType::I4 || op.kind != Kind::Latent, "latents are not kept in 4 bits");
    blocks_ = blocks;
    block_bytes_ = kv_heads_ * kv_head_bytes(kv, head_dim_);
    kv_ = std::make_unique<Region>((size_t)(blocks * block_bytes_ * layers_));
    // All layers of a block lie together: a pool that is partly used then has no partly used huge page in each layer.
    for (auto& op : body_) {
        uint8_t* pool = kv_->data() + op.layer * block_bytes_;
        const float k_scale = scales.empty() ? 1.0f : scales[(size_t)(2 * op.layer)];
        const float v_scale = scales.empty() ? 1.0f : scales[(size_t)(2 * op.layer + 1)];
        if (appends(op)) {
            op.rope.pool = pool;
            op.rope.block_bytes = block_bytes();
            op.rope.kv = kv;
            op.rope.k_scale = k_scale;
            op.rope.v_scale = v_scale;
        }
        if (op.kind == Kind::Attention || op.kind == Kind::Merge) {
            op.attention.pool = pool;
            op.attention.block_bytes = block_bytes();
            op.attention.kv = kv;
            op.attention.scale *= k_scale;
            op.attention.v_scale = v_scale;
            if (op.attention.slopes && k_scale != 1.0f) {
                std::vector<float> raised(op.attention.slopes, op.attention.slopes + op.attention.q_heads);
                for (float& slope : raised) slope /= k_scale;
                op.attention.slopes = keep(raised);
            }
            op.attention.partials = partials_.data();
            need_scratch(attention_scratch_bytes(op.attention.head_dim, kv));
        }
    }
}

void Plan::prefault_pool(int64_t bytes) {
    require(kv_ && !prefault_, "a pool is prefaulted once, when there is one");
    require(bytes >= 0, "bytes to prefault: " + std::to_string(bytes));
    if (bytes > 0) prefault_ = std::make_unique<Prefault>(kv_->data(), (size_t)std::min<int64_t>(bytes, (int64_t)kv_->size()));
}

void Plan::copy_blocks(const int32_t* pairs, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
        const int64_t from = pairs[2 * i], to = pairs[2 * i + 1];
        require(from >= 0 && from < blocks_ && to >= 0 && to < blocks_, "block copy outside the pool");
        std::memmove(kv_->data() + to * block_bytes(), kv_->data() + from * block_bytes(), (size_t)block_bytes());
    }
}

AttentionWork& Plan::work_list(const AttentionArgs& a) {
    for (auto& w : work_)
        if (w->serves(a.window, a.chunked, a.q_heads, a.kv_heads, bidirectional_)) return *w;
    work_.push_back(std::make_unique<AttentionWork>(a.window, a.chunked, a.q_heads, a.kv_heads, bidirectional_));
    return *work_.back();
}

int64_t Plan::rows_of(const Operation& op) const {
    const bool head = &op >= head_.data() && &op < head_.data() + head_.size();
    return head ? step_rows_ : step_tokens_;
}

void Plan::prepare(Operation& op, int64_t rows) {
    switch (op.kind) {
        case Kind::Linear:
            op.tiles = cut_linear(op.linear, rows, op.tuned, threads());
            return;
        case Kind::Attention:
            op.tiles = (int64_t)work_list(op.attention).items().size();
            return;
        case Kind::Merge:
            op.tiles = (int64_t)work_list(op.attention).merges().size();
            return;
        case Kind::Sample:
            op.tiles = rows;
            return;
        case Kind::ExpertSort: case Kind::ExpertGateUp: case Kind::ExpertDown: case Kind::HeadLinear:
            op.tiles = prepare_experts(op, rows);
            return;
        default:
            if (op.kind == Kind::Norm && op.norm.gather) op.norm.gather = logit_rows.data() + first_row_;
            op.rows_per_tile = std::clamp<int64_t>(rows / (4 * pool_.threads()), 1, 32);
            op.tiles = ceil_div(rows, op.rows_per_tile);
    }
}

void Plan::run_tile(Operation& op, int64_t tile, int worker) {
    auto each_row = [&](auto&& kernel) {
        const int64_t rows = rows_of(op);
        const int64_t end = std::min(rows, (tile + 1) * op.rows_per_tile);
        for (int64_t row = tile * op.rows_per_tile; row < end; ++row) kernel(row);
    };
    switch (op.kind) {
        case Kind::Embed: each_row([&](int64_t r) { kernels_.embed_row(op.embed, r); }); break;
        case Kind::Norm: each_row([&](int64_t r) { kernels_.norm_row(op.norm, r); }); break;
        case Kind::Rope: each_row([&](int64_t r) { kernels_.rope_row(op.rope, r); }); break;
        case Kind::Elementwise: each_row([&](int64_t r) { kernels_.elementwise(op.elementwise, r); }); break;
        case Kind::Linear: kernels_.linear_tile(op.linear, tile); break;
        case Kind::Route: each_row([&](int64_t r) { kernels_.route_row(op.route, r); }); break;
        case Kind::ExpertSort: sort_experts(op.experts); break;
        case Kind::ExpertGateUp: kernels_.expert_gate_up(op.experts, tile, scratch_->data() + worker * scratch_bytes_); break;
        case Kind::ExpertDown: kernels_.expert_down(op.experts, tile); break;
        case Kind::HeadLinear: kernels_.head_linear_tile(op.heads, tile); break;
        case Kind::Latent: each_row([&](int64_t r) { kernels_.latent_row(op.latent, op.rope, r); }); break;
        case Kind::Attention:
            kernels_.attention_item(op.attention, work_list(op.attention).items()[(size_t)tile], scratch_->data() + worker * scratch_bytes_);
            break;
        case Kind::Merge: {
            const AttentionMerge& m = work_list(op.attention).merges()[(size_t)tile];
            kernels_.attention_merge(op.attention, m.token, m.partial, m.spans, m.tokens);
            break;
        }
        case Kind::Sample: {
            float* logits = (float*)(arena_.data() + logits_.data) + tile * logits_.width;
            if (logits_out_) std::memcpy(logits_out_ + (first_row_ + tile) * limits_.vocab, logits, (size_t)limits_.vocab * 4);
            if (sampler_) sampler_->sample_row((int)(first_row_ + tile), logits, worker);
        }
    }
}

// The operations of one pass over the pool: the body, the head, or both.
class Plan::StepJob final : public Job {
  public:
    StepJob(Plan& plan, bool body, bool head) : plan_(plan), body_(body ? (int)plan.body_.size() : 0), head_(head ? (int)plan.head_.size() : 0) {}
    int operations() const override { return body_ + head_; }
    int64_t tiles(int op) const override { return at(op).tiles; }
    void run_tile(int op, int64_t tile, int worker) noexcept override { plan_.run_tile(at(op), tile, worker); }
    void operation_done(int op) noexcept override {
        if (!plan_.profiling_) return;
        const auto now = std::chrono::steady_clock::now();
        at(op).seconds = std::chrono::duration<double>(now - plan_.operation_start_).count();
        plan_.count(at(op), at(op).seconds);
        plan_.operation_start_ = now;
    }

  private:
    Operation& at(int op) const { return op < body_ ? plan_.body_[(size_t)op] : plan_.head_[(size_t)(op - body_)]; }
    Plan& plan_;
    int body_, head_;
};

void Plan::run(int64_t sequences, int64_t rows, Sampler* sampler, float* logits_out) {
    require(sequences >= 1 && sequences <= limits_.max_sequences, "sequences of a step: " + std::to_string(sequences) + ", limit " + std::to_string(limits_.max_sequences));
    require(layers_ == 0 || kv_, "a plan with attention needs a pool before it is run");
    const int64_t known = known_tokens_ > 0 ? known_tokens_ : limits_.vocab;
    int64_t count = 0;
    for (int64_t s = 0; s < sequences; ++s) {
        const int64_t start = starts[(size_t)s], n = counts[(size_t)s];
        require(start >= 0 && n >= 1 && start + n <= limits_.table_stride * kBlock && count + n <= limits_.max_tokens,
                "sequence " + std::to_string(s) + " of the step has tokens " + std::to_string(start) + ".." + std::to_string(start + n) +
                    " outside the limits");
        const int32_t* table = block_tables.data() + s * limits_.table_stride;
        if (blocks_ > 0)
            for (int64_t b = 0; b < ceil_div(start + n, kBlock); ++b)
                require(table[b] >= 0 && table[b] < blocks_, "block " + std::to_string(table[b]) + " is outside the pool of " + std::to_string(blocks_));
        for (int64_t i = 0; i < n; ++i) {
            const int64_t position = start + i;
            positions_[(size_t)(count + i)] = (int32_t)position;
            slots_[(size_t)(count + i)] = table[position / kBlock] * kBlock + (int32_t)(position % kBlock);
            const int32_t token = tokens[(size_t)(count + i)];
            require(token >= 0 && token < known, "token " + std::to_string(token) + " is outside the vocabulary of " + std::to_string(known));
        }
        if (bidirectional_) {
            require(start == 0, "sequence " + std::to_string(s) + " begins at " + std::to_string(start) + ", but is to be seen whole");
            std::fill_n(ends_.begin() + count, n, (int32_t)(n - 1));
        }
        count += n;
    }
    require(rows >= 0 && rows <= count, "logit rows");
    for (int64_t r = 0; r < rows; ++r)
        require(logit_rows[(size_t)r] >= 0 && logit_rows[(size_t)r] < count, "logit row " + std::to_string(logit_rows[(size_t)r]) + " is outside the step");
    step_tokens_ = count;
    sampler_ = sampler;
    logits_out_ = logits_out;
    require(!sampler || (rows <= sampler->max_rows() && threads() <= sampler->max_workers() && sampler->vocab() == limits_.vocab),
            "the sampler has too few rows or workers, or another vocabulary");
    const AttentionStep step{sequences, starts.data(), counts.data(), block_tables.data(), limits_.table_stride, threads()};
    for (auto& w : work_) w->build(step, kPartialSlots);
    for (auto& op : body_) prepare(op, step_tokens_);
    if (!scratch_ && scratch_bytes_ > 0) scratch_ = std::make_unique<Region>((size_t)(scratch_bytes_ * pool_.threads()));  // the first time
    if (profiling_) operation_start_ = std::chrono::steady_clock::now();
    // Heads run in slices of rows, so that the logits of a long prompt never all exist at once.
    bool body = true;
    for (first_row_ = 0; body || first_row_ < rows; first_row_ += limits_.head_rows) {
        step_rows_ = std::min(limits_.head_rows, rows - first_row_);
        const bool head = step_rows_ > 0 && !head_.empty();
        if (head)
            for (auto& op : head_) prepare(op, step_rows_);
        StepJob job(*this, body, head);
        pool_.run(job);
        body = false;
    }
}

void Plan::set_profiling(bool on) {
    profiling_ = on;
    profile_.clear();
}

// What an operation that works row by row reads and writes for each.
double Plan::row_bytes(const Operation& op) const {
    switch (op.kind) {
        case Kind::Embed: return (double)(op.embed.w.panel_bytes / kPanel + op.embed.out_stride * 4);
        case Kind::Norm: return (double)(op.norm.width * 4 + Activation::row_bytes(op.norm.out.form, op.norm.out.width));
        case Kind::Rope: {
            const RopeArgs& r = op.rope;
            const int64_t values = (int64_t)r.head_dim * (r.q_heads + 2 * r.kv_heads), written = Activation::row_bytes(r.q_form, (int64_t)r.head_dim * r.q_heads);
            return (double)(4 * values + written + r.kv_heads * kv_head_bytes(r.kv, r.head_dim) / kBlock);
        }
        case Kind::Elementwise: return (double)(op.elementwise.width * 4 * (op.elementwise.b ? 3 : 2));
        case Kind::Sample: return (double)(limits_.vocab * 4);
        case Kind::Route: return (double)((op.route.experts + 2 * op.route.top_k) * 4);
        case Kind::Latent: return (double)((op.latent.heads * op.latent.rope_dim + op.rope.head_dim * 3) * (4 + (op.rope.q_form == Act::F32 ? 4 : 2)));
        default: return 0;
    }
}

void Plan::count(const Operation& op, double seconds) {
    // Operations of one name, those of all layers, are added up.
    OperationProfile* entry = nullptr;
    for (auto& p : profile_)
        if (p.name == op.name) entry = &p;
    if (!entry) {
        profile_.push_back({op.name, 0, 0, 0, 0});
        entry = &profile_.back();
    }
    ++entry->calls;
    entry->seconds += seconds;
    const double rows = (double)rows_of(op);
    if (op.kind == Kind::Linear) {
        const WeightView& w = op.linear.w;
        const double scale_bytes = (double)(w.columns * w.groups * (w.scale_f16 ? 2 : 4)) * (w.minimums ? 2 : 1);
        entry->bytes += (double)(w.columns / kPanel * w.panel_bytes) + scale_bytes;
        entry->operations += 2.0 * rows * (double)w.columns * (double)w.k_padded;
    } else if (op.kind == Kind::Attention) {
        const AttentionArgs& a = op.attention;
        for (const auto& item : work_list(a).items()) {
            const double heads = item.head_end - item.head_begin, shared = (double)AttentionWork::shared_tokens(item);
            double keys = shared, pairs = 0;
            for (int p = 0; p < item.pieces; ++p) {
                const double own = (double)AttentionWork::own_tokens(item, item.piece[p]);
                keys += own;
                pairs += (shared + own) * (item.piece[p].token_end - item.piece[p].token_begin);
            }
            entry->bytes += keys * heads * (double)kv_head_bytes(a.kv, a.head_dim) / kBlock;
            entry->operations += 4.0 * pairs * heads * (a.q_heads / a.kv_heads) * a.head_dim;
        }
    } else {
        entry->bytes += rows * row_bytes(op);
        count_experts(op, *entry);
    }
}

}  // namespace octavo
