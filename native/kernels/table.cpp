// Exports this instruction-set level's kernels.
#include "kernels.h"

#define OCTAVO_STRING_(x) #x
#define OCTAVO_STRING(x) OCTAVO_STRING_(x)

namespace octavo::OCTAVO_ISA {

extern const KernelTable table;
const KernelTable table = {
    OCTAVO_STRING(OCTAVO_ISA), linear_tile, embed_row, norm_row, rope_row, attention_item, attention_merge, elementwise,
    route_row, expert_gate_up, expert_down, head_linear_tile, latent_row,
    sample_scan, sample_exponentials, sample_keep, sample_rank, round_symmetric, round_affine, peak_work, read_bandwidth_work,
};

}  // namespace octavo::OCTAVO_ISA
