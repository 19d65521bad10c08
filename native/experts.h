// Plain data of mixtures of experts and of latent attention, shared by their kernels and the plan.
#pragma once
#include "common.h"

namespace octavo {

constexpr int kMaxExperts = 1024;

// How router logits become the scores experts are chosen by: a softmax over all experts, a sigmoid of each, or the logits themselves
// with a softmax over those chosen (gpt-oss).
enum class Scoring : int { Softmax = 0, Sigmoid = 1, SoftmaxOfChosen = 2 };

// The experts of a row and their weights. Of equal scores the expert of lower number comes first.
struct RouteArgs {
    const float* logits = nullptr;  // [rows][logits_stride]
    int64_t logits_stride = 0;
    int experts = 0, top_k = 0;
    Scoring scoring = Scoring::Softmax;
    bool renormalize = false;           // the weights of a row are divided by their sum
    float scale = 1.0f;                 // and multiplied with this
    const float* correction = nullptr;  // [experts] added to the scores for the choice only, or null
    // The experts are in `groups` groups of equal size, and only those of the best `top_groups` are chosen from. A group counts
    // what its best expert does, or its best two together.
    int groups = 1, top_groups = 1;
    bool group_pairs = false;
    float* out = nullptr;  // [rows][out_stride]: top_k weights, best first, then as many expert numbers
    int64_t out_stride = 0;
};

// Rows of one expert that are computed together: [begin, end) of the sorted list.
struct ExpertTile {
    int32_t expert, begin, end;
};

// The rows of a step, each as often as it has experts, sorted by expert and then by row. Shared by the mixtures of all layers.
struct ExpertList {
    int32_t* row = nullptr;
    float* weight = nullptr;
    ExpertTile* tiles = nullptr;  // in the order of experts
    int64_t tile_count = 0;
};

struct ExpertsArgs {
    const float* route = nullptr;  // as RouteArgs::out
    int64_t route_stride = 0;
    int experts = 0, top_k = 0;
    int64_t rows = 0;
    ExpertList* list = nullptr;
    ActView x;
    bool scale_inputs = false;              // weights multiply the rows of x for each expert, instead of what it gives
    const WeightView* gate_up = nullptr;    // [experts], 16 columns of gate, then 16 of up
    const float* gate_up_bias = nullptr;    // [experts][packed columns] or null
    Epilogue activation = Epilogue::SiluMul;
    float alpha = 1.0f, limit = 0.0f;       // of the activation, as LinearArgs has them
    ActView hidden;                         // act(gate) * up of every row of the sorted list
    int64_t column_tile = 0, column_tiles = 0;
    const WeightView* down = nullptr;       // [experts]
    const float* down_bias = nullptr;       // [experts][packed columns] or null
    int64_t down_tile = 0;                  // packed columns that one claim computes for all rows: 32 or 64
    bool add = false;                       // to what the output holds, else from zero
    float* out = nullptr;                   // [rows][out_stride]
    int64_t out_stride = 0, out_columns = 0;
};

// A linear for each head, of that head's part of a row alone. Values are f32 or bf16.
struct HeadLinearArgs {
    const WeightView* w = nullptr;  // [heads], all of one shape
    int heads = 0;
    int64_t rows = 0;
    int row_tile = 0;
    ActView in, out;                // whole rows
    int64_t in_first = 0, in_step = 0, out_first = 0, out_step = 0;  // columns: of the first head, and from head to head
    int64_t columns = 0;            // real ones of a head
};

// Queries and the cached latent of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1). A head of queries and the
// only head of keys are [rotated part | latent]; values are a copy of keys. Of queries only the rotated part is written.
struct LatentArgs {
    const float* q = nullptr;   // [rows][q_stride]; the part to rotate of head h is at q_first + h * q_step
    int64_t q_stride = 0, q_first = 0, q_step = 0;
    const float* kv = nullptr;  // [rows][kv_stride]: from kv_first on the latent, then the part to rotate
    int64_t kv_stride = 0, kv_first = 0;
    int heads = 0, rank = 0, rope_dim = 0;
    bool interleaved = false;   // pairs are neighbours, as stored, instead of halves
    const float* norm = nullptr;  // [rank]
    float norm_eps = 0.0f;
};

}  // namespace octavo
