// A compiled model: a flat list of operations over one arena, run for a whole step in one call.
#pragma once
#include <algorithm>
#include <chrono>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "attention_work.h"
#include "experts.h"
#include "kernel_table.h"
#include "memory.h"
#include "packed_weight.h"
#include "prefault.h"
#include "thread_pool.h"
#include "tiles.h"

namespace octavo {

class Sampler;

// A value in the arena: offsets in bytes; the last three only for int8.
struct Activation {
    Act form = Act::F32;
    int64_t width = 0;
    int group = 32;
    int64_t data = 0, scales = 0, scaled_sums = 0, sums = 0;
    int rotation = 0;
    static int64_t row_bytes(Act form, int64_t width) { return width * (form == Act::F32 ? 4 : form == Act::BF16 ? 2 : 1); }
};

struct StepLimits {
    int64_t max_tokens = 0;      // per step
    int64_t max_sequences = 0;   // per step
    int64_t table_stride = 0;    // blocks of a sequence at the most
    int64_t head_rows = 0;       // rows of logits held at once
    int64_t vocab = 0;
};

struct OperationProfile {
    std::string name;
    int64_t calls = 0;
    double seconds = 0, bytes = 0, operations = 0;
};

class Plan {
  public:
    Plan(const std::string& level, int threads, const StepLimits& limits, int64_t arena_bytes);
    ~Plan();

    // Building. Offsets are checked against the arena; a wrong one throws std::invalid_argument.
    // Rows picked by token ids, or by positions plus `offset`.
    void add_embed(std::string name, std::shared_ptr<PackedWeight> weight, const Activation& out, float scale, bool positions = false,
                   int64_t offset = 0);
    void add_norm(std::string name, const Activation& x, int64_t width, const std::vector<float>& weight,
                  const std::vector<float>& bias, float eps, bool layer, const Activation& out, bool gather,
                  const std::vector<int32_t>& order = {});
    void add_linear(std::string name, std::shared_ptr<PackedWeight> weight, const Activation& in, const std::vector<float>& bias,
                    Epilogue epilogue, const Activation& out, int64_t out_columns);
    // Cosines and sines [positions][rope_dim / 2] that any number of layers can use; gives the number to use them by.
    int add_rope_tables(const float* cos, const float* sin, int64_t values);
    // Factors [positions] of queries that any number of layers can use; gives the number to use them by.
    int add_query_factors(const std::vector<float>& factors);
    // `factors` below 0: queries have none.
    void add_rope(std::string name, const Activation& qkv, int layer, int q_heads, int kv_heads, int head_dim, int rope_dim, int tables,
                  const std::vector<float>& q_norm, const std::vector<float>& k_norm, float norm_eps, const Activation& q,
                  bool norm_layer = false, bool wide_norms = false, bool norm_after = false, int factors = -1);
    void add_attention(std::string name, const Activation& q, int layer, int q_heads, int kv_heads, int head_dim, float scale,
                       float softcap, int window, const Activation& out, const std::vector<float>& slopes = {}, bool chunked = false,
                       const std::vector<float>& sinks = {});
    void add_elementwise(std::string name, Elementwise kind, const Activation& a, const Activation* b, int64_t width, float scalar,
                         const Activation& out);
    // Every token attends to the whole of its sequence, all of which is in one step. Call before the first add_attention.
    void set_bidirectional();
    // Mixtures of experts (plan_experts.cpp). The output of add_route: top_k weights of each row, then as many expert numbers.
    void add_route(std::string name, const Activation& logits, const RouteArgs& args, const std::vector<float>& correction,
                   const Activation& out);
    // gate and up interleaved 16 by 16, then down, of the experts that each row is routed to; their weighted sum, added to `out` if `add`.
    // hidden: room for rows * top_k rows.
    using Weights = std::vector<std::shared_ptr<PackedWeight>>;
    void add_experts(std::string name, const Activation& route, int top_k, const Activation& x, const Weights& gate_up,
                     const std::vector<float>& gate_up_bias, Epilogue activation, float alpha, float limit, const Activation& hidden,
                     const Weights& down, const std::vector<float>& down_bias, bool add, const Activation& out, int64_t out_columns,
                     bool scale_inputs);
    // Multi-head latent attention (plan_latent.cpp): head h reads columns in_first + h * in_step ..., writes out_first + h * out_step ...
    void add_head_linear(std::string name, const Weights& weights, const Activation& in, int64_t in_first, int64_t in_step,
                         const Activation& out, int64_t out_first, int64_t out_step);
    // Rotated parts of the queries go to the first rope_dim columns of each head of q_out; the latent is normed and appended to the cache.
    void add_latent(std::string name, int layer, const Activation& q, const Activation& kv, const LatentArgs& args, int tables,
                    const std::vector<float>& norm, const Activation& q_out);
    void begin_head();  // the operations that follow work on the rows whose logits are wanted
    void set_logits(const Activation& logits);
    // Makes the KV pool of `blocks` blocks, each for all layers. Call after the last add_attention. `scales`: none, or of fp8 those of
    // keys and values of layer 0, of layer 1, and so on.
    void make_pool(int64_t blocks, KvType kv, const std::vector<float>& scales);
    // Has the first `bytes` of the pool, or all of it, given memory in the background; they are what is written first.
    void prefault_pool(int64_t bytes);
    bool pool_prefaulted() const { return !prefault_ || prefault_->done(); }

    // One step. Inputs are in the public arrays. Throws std::invalid_argument when an input is out of range.
    // rows: logit rows wanted; with a sampler, row i is sampled as its row i; with logits_out, raw logits are copied there.
    void run(int64_t sequences, int64_t rows, Sampler* sampler, float* logits_out);
    void copy_blocks(const int32_t* pairs, int64_t count);

    std::vector<int32_t> tokens, starts, counts, block_tables, logit_rows;

    const StepLimits& limits() const { return limits_; }
    int threads() const { return pool_.threads(); }
    const char* level() const { return kernels_.name; }
    uint8_t* arena() { return arena_.data(); }
    int64_t arena_bytes() const { return (int64_t)arena_.size(); }
    int64_t block_bytes() const { return block_bytes_ * layers_; }
    void set_profiling(bool on);
    std::vector<OperationProfile> profile() const { return profile_; }

    // Tuning. Linears are numbered in the order they were added; a number outside, or a tile that is not allowed, throws
    // std::invalid_argument.
    struct LinearReport {
        std::string name;
        const LinearArgs& args;  // of the last run
        int64_t max_rows;
        double seconds;  // of the last run, when it was profiled
    };
    std::vector<LinearReport> linears() const;
    void set_tile(int64_t linear, const TunedTile& tile);
    void clear_tiles();
    // How a step of `rows` rows is cut: row tile, column tile, regions.
    TileShape tile_of(int64_t linear, int64_t rows);

  private:
    enum class Kind {
        Embed, Norm, Linear, Rope, Attention, Merge, Elementwise, Sample, Route, ExpertSort, ExpertGateUp, ExpertDown, HeadLinear, Latent
    };
    struct Operation {
        Kind kind;
        std::string name;
        int64_t rows_per_tile = 1;
        int64_t tiles = 0;
        double seconds = 0;  // of the last run, when it was profiled
        std::vector<TunedTile> tuned;
        EmbedArgs embed;
        NormArgs norm;
        LinearArgs linear;
        RopeArgs rope;
        AttentionArgs attention;
        ElementwiseArgs elementwise;
        RouteArgs route;
        ExpertsArgs experts;
        HeadLinearArgs heads;
        LatentArgs latent;
        int layer = 0;
    };
    class StepJob;

    ActView view(const Activation& a, int64_t rows) const;
    const float* keep(const std::vector<float>& values, int64_t padded = 0);
    const float* keep(const float* values, size_t size, size_t padded);
    Operation& add(Kind kind, std::string name);
    std::pair<Operation*, int64_t> linear(int64_t index);  // and its rows at the most
    void prepare(Operation& op, int64_t rows);
    AttentionWork& work_list(const AttentionArgs& args);
    void run_tile(Operation& op, int64_t tile, int worker);
    void count(const Operation& op, double seconds);
    int64_t rows_of(const Operation& op) const;
    int64_t most_rows() const { return in_head_ ? limits_.head_rows : limits_.max_tokens; }
    int64_t prepare_experts(Operation& op, int64_t rows);
    void sort_experts(const ExpertsArgs& args);
    void count_experts(const Operation& op, OperationProfile& entry) const;
    const WeightView* keep_views(const Weights& weights);
    void need_scratch(int64_t bytes) { scratch_bytes_ = std::max(scratch_bytes_, round_up(bytes, 4096)); }
    double row_bytes(const Operation& op) const;

    const KernelTable& kernels_;
    StepLimits limits_;
    Region arena_;
    std::unique_ptr<Region> kv_;
    std::unique_ptr<Prefault> prefault_;  // of the pool, so that it ends first
    ThreadPool pool_;
    std::vector<Operation> body_, head_;
    bool in_head_ = false;
    std::vector<std::unique_ptr<float[]>> constants_;
    std::vector<std::unique_ptr<int32_t[]>> orders_;
    struct RopeTables {
        const float *cos, *sin;
        int64_t values;
    };
    std::vector<RopeTables> rope_tables_;
    std::vector<std::pair<const float*, size_t>> query_factors_;
    std::vector<std::shared_ptr<PackedWeight>> weights_;
    std::vector<std::unique_ptr<WeightView[]>> weight_views_;
    ExpertList expert_list_;  // of the operation that runs
    std::vector<int32_t> expert_rows_, expert_ends_;
    std::vector<float> expert_weights_;
    std::vector<ExpertTile> expert_tiles_;
    std::vector<int32_t> positions_, slots_;
    std::vector<int32_t> ends_;  // the last position of each token's sequence; filled where all of it is seen
    bool bidirectional_ = false;
    int64_t known_tokens_ = 0;  // ids that the embedding has a row for
    std::vector<std::unique_ptr<AttentionWork>> work_;  // per window and head shape
    std::vector<float> partials_;
    std::unique_ptr<Region> scratch_;
    int64_t scratch_bytes_ = 0;
    int64_t blocks_ = 0, block_bytes_ = 0;
    int layers_ = 0, kv_heads_ = 0, head_dim_ = 0;
    int64_t step_tokens_ = 0, step_rows_ = 0;
    Activation logits_;
    Sampler* sampler_ = nullptr;
    float* logits_out_ = nullptr;
    int64_t first_row_ = 0;
    bool profiling_ = false;
    std::vector<OperationProfile> profile_;
    std::chrono::steady_clock::time_point operation_start_;
};

}  // namespace octavo
