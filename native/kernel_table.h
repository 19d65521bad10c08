// The table of kernels that each instruction-set level exports, and how a level is chosen.
#pragma once
#include <string>
#include <vector>

#include "common.h"

namespace octavo {

// Rows of a linear's tile at the most.
constexpr int kMaxRowTile = 96;

enum class Elementwise : int {
    Add = 0, Scale = 1, Softcap = 2, SiluMul = 3, GeluMul = 4, GeluTanhMul = 5, Gelu = 6, GeluTanh = 7, Silu = 8, Relu = 9, Relu2 = 10,
    Clip = 11, SigmoidGate = 12
};
enum class PeakKind : int { F32 = 0, BF16 = 1, I8 = 2 };

struct ElementwiseArgs {
    Elementwise kind = Elementwise::Add;
    const float* a = nullptr;
    const float* b = nullptr;      // Add and the *Mul kinds; SigmoidGate: one value a row, whose sigmoid a is multiplied with
    int64_t a_stride = 0, b_stride = 0, out_stride = 0, width = 0;
    float scalar = 1.0f;           // Scale: factor; Softcap: cap; Clip: limit of the magnitude
    float* out = nullptr;
};

// Logits of a row that the sampler's passes take together. Arrays a pass writes to are as long as the row in whole blocks.
constexpr int64_t kSampleBlock = 64;

// Groups of weights rounded while loading are multiples of 16 up to this.
constexpr int kMaxRoundedGroup = 256;

struct RouteArgs;
struct ExpertsArgs;
struct HeadLinearArgs;
struct LatentArgs;

struct KernelTable {
    const char* name;
    void (*linear_tile)(const LinearArgs&, int64_t tile);
    void (*embed_row)(const EmbedArgs&, int64_t row);
    void (*norm_row)(const NormArgs&, int64_t row);
    void (*rope_row)(const RopeArgs&, int64_t row);
    void (*attention_item)(const AttentionArgs&, const AttentionItem&, uint8_t* scratch);
    // Merges the states of a token's `spans` spans, kept from slot `partial` on as AttentionItem says; `tokens`: of its item.
    void (*attention_merge)(const AttentionArgs&, int64_t token, int partial, int spans, int64_t tokens);
    void (*elementwise)(const ElementwiseArgs&, int64_t row);
    // Of mixtures of experts and of latent attention: see experts.h. scratch: expert_scratch_bytes().
    void (*route_row)(const RouteArgs&, int64_t row);
    void (*expert_gate_up)(const ExpertsArgs&, int64_t tile, uint8_t* scratch);
    void (*expert_down)(const ExpertsArgs&, int64_t tile);
    void (*head_linear_tile)(const HeadLinearArgs&, int64_t tile);
    void (*latent_row)(const LatentArgs&, const RopeArgs& append, int64_t row);
    // The passes of the sampler over a row of n logits, the same bits on every level. What is found block by block is kept.
    // The maximum of each block and of the row. False if any logit is NaN or +infinity.
    bool (*sample_scan)(const float* x, int64_t n, float* block_max, float* maximum);
    // e^((x[i] - maximum) * scale) into out (unless null), 0 behind the end; the sum of each block; returns the sum of all.
    double (*sample_exponentials)(const float* x, int64_t n, float maximum, float scale, float* out, float* block_sum);
    // Sets to 0 every e[i] whose measure is below (above: keep those at least `threshold`) or above it; sums as before.
    double (*sample_keep)(float* e, const float* measure, int64_t n, float threshold, bool above, float* block_sum);
    // 1 + how many logits come before the token: larger ones, and equal ones of lower id.
    int64_t (*sample_rank)(const float* x, int64_t n, int64_t token, const float* block_max);
    // A row of k weights in whole groups, rounded as src/octavo/quantization/rows.py says, the same bits on every level: 8 bits around
    // code 128, rotated in blocks of 32 or 64 first (0: not), or 4 bits with a minimum. Scales and minimums are values of f16. False
    // if a weight is not finite or too large for them.
    bool (*round_symmetric)(const float* row, int64_t k, int group, int rotation, uint8_t* codes, float* scales);
    bool (*round_affine)(const float* row, int64_t k, int group, uint8_t* codes, float* scales, float* minimums);
    double (*peak_work)(PeakKind, int64_t iterations);                 // returns operations done
    double (*read_bandwidth_work)(const uint8_t* data, int64_t bytes);  // returns a checksum
};

// Levels compiled in and runnable here, worst first.
std::vector<std::string> available_levels();
// By name, or the best one when empty; throws std::invalid_argument naming the level and the available ones.
const KernelTable& kernel_table(const std::string& name);

}  // namespace octavo
