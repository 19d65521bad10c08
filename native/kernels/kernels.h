// The kernels of one instruction-set level, as the kernel table exports them, and helpers they share.
#pragma once
#include "kernel_table.h"
#include "simd.h"

namespace octavo::OCTAVO_ISA {

void linear_tile(const LinearArgs& args, int64_t tile_index);
void embed_row(const EmbedArgs& args, int64_t row);
void norm_row(const NormArgs& args, int64_t row);
void rope_row(const RopeArgs& args, int64_t row);
void attention_item(const AttentionArgs& args, const AttentionItem& item, uint8_t* scratch);
void attention_merge(const AttentionArgs& args, int64_t token, int partial, int spans, int64_t tokens);
void elementwise(const ElementwiseArgs& args, int64_t row);
void route_row(const RouteArgs& args, int64_t row);
void expert_gate_up(const ExpertsArgs& args, int64_t index, uint8_t* scratch);
void expert_down(const ExpertsArgs& args, int64_t index);
void head_linear_tile(const HeadLinearArgs& args, int64_t index);
void latent_row(const LatentArgs& args, const RopeArgs& append, int64_t row);
bool sample_scan(const float* x, int64_t n, float* block_max, float* maximum);
double sample_exponentials(const float* x, int64_t n, float maximum, float scale, float* out, float* block_sum);
double sample_keep(float* e, const float* measure, int64_t n, float threshold, bool above, float* block_sum);
int64_t sample_rank(const float* x, int64_t n, int64_t token, const float* block_max);
bool round_symmetric(const float* row, int64_t k, int group, int rotation, uint8_t* codes, float* scales);
bool round_affine(const float* row, int64_t k, int group, uint8_t* codes, float* scales, float* minimums);
double peak_work(PeakKind kind, int64_t iterations);
double read_bandwidth_work(const uint8_t* data, int64_t bytes);

// Writes `count` values (a multiple of the group for int8) of each of `rows` rows from `row` and `column` on in the view's form;
// those of the next row are `stride` further.
void store_activations(const ActView& out, int64_t row, int rows, int64_t column, int count, const float* values, int64_t stride);

}  // namespace octavo::OCTAVO_ISA
