// The table of kernels that each instruction-set level exports, and how a level is chosen.
#pragma once
#include <string>
#include <vector>

#include "common.h"

namespace octavo {

// Rows of a linear's tile at the most.
constexpr int kMaxRowTile = 96;

enum class Elementwise : int { Add = 0, Scale = 1, Softcap = 2, SiluMul = 3, GeluMul = 4, GeluTanhMul = 5, Gelu = 6, GeluTanh = 7, Silu = 8 };
enum class PeakKind : int { F32 = 0, BF16 = 1, I8 = 2 };

struct ElementwiseArgs {
    Elementwise kind = Elementwise::Add;
    const float* a = nullptr;
    const float* b = nullptr;      // Add and the *Mul kinds
    int64_t a_stride = 0, b_stride = 0, out_stride = 0, width = 0;
    float scalar = 1.0f;           // Scale: factor; Softcap: cap
    float* out = nullptr;
};

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
    double (*peak_work)(PeakKind, int64_t iterations);                 // returns operations done
    double (*read_bandwidth_work)(const uint8_t* data, int64_t bytes);  // returns a checksum
};

// Levels compiled in and runnable here, worst first.
std::vector<std::string> available_levels();
// By name, or the best one when empty; throws std::invalid_argument naming the level and the available ones.
const KernelTable& kernel_table(const std::string& name);

}  // namespace octavo
