// Plain data shared by the kernels, the plan interpreter and the bindings: weight forms, activation views, kernel arguments.
#pragma once
#include <cstddef>
#include <cstdint>

namespace octavo {

// Columns are packed in panels of 16; a row of a panel is 64 bytes: 16 columns x 4 bytes of k, on every instruction set.
constexpr int kPanel = 16;
constexpr int kPanelRowBytes = 64;
// Packed column counts are padded to this, so that a tile of columns never has a tail (padding is zero weights).
constexpr int kColumnTile = 64;
// The k of every packed weight and activation is padded to this with zeros.
constexpr int kKPad = 32;
// k per scale of int8 activations at the most.
constexpr int kMaxActGroup = 256;
// Attention runs an online softmax over chunks of 64 tokens inside spans of 512, both at fixed absolute positions: the order of
// every sum is then the same for decode, chunked prefill and a prefix hit.
constexpr int kBlock = 16;
constexpr int kChunk = 64;
constexpr int kSpan = 512;
constexpr int kMaxHeadDim = 576;  // of a latent of 512 and 64 rotated dimensions (DeepSeek)

// Lut4: 4-bit codes into 16 integers; Lut4F: into 16 floats; E4M3, E5M2: 8-bit floats.
enum class Form : int { F32 = 0, BF16 = 1, W8 = 2, W4 = 3, Lut4 = 4, Lut4F = 5, E4M3 = 6, E5M2 = 7 };
enum class Act : int { F32 = 0, BF16 = 1, I8 = 2 };
// What keys and values are stored as. The scaled types have one bf16 scale for the key and one for the value of each token and kv head.
enum class KvType : int { F32 = 0, BF16 = 1, F16 = 2, E4M3 = 3, E5M2 = 4, E4M3Scaled = 5, I8 = 6, I4 = 7 };
constexpr int kKvTypes = 8;
// ClampedSiluMul (gpt-oss): gate is at most `limit`, up within +-limit, and the output (up + 1) * gate * sigmoid(alpha * gate).
enum class Epilogue : int {
    Store = 0, Add = 1, SiluMul = 2, GeluMul = 3, GeluTanhMul = 4, Gelu = 5, GeluTanh = 6, Silu = 7, Relu = 8,
    Relu2 = 9, ClampedSiluMul = 10
};

constexpr bool is_float8(Form f) { return f == Form::E4M3 || f == Form::E5M2; }
constexpr bool is_lut4(Form f) { return f == Form::Lut4 || f == Form::Lut4F; }
// Whether codes and scales are packed for it, without minimums.
constexpr bool is_table(Form f) { return is_lut4(f) || is_float8(f); }
// The activations a form is multiplied with.
constexpr Act activations_of(Form f) {
    return f == Form::F32 ? Act::F32 : f == Form::BF16 || f == Form::Lut4F || is_float8(f) ? Act::BF16 : Act::I8;
}

// Whether packed columns are pairs, of which an output column is made.
constexpr bool halves_columns(Epilogue e) {
    return e == Epilogue::SiluMul || e == Epilogue::GeluMul || e == Epilogue::GeluTanhMul || e == Epilogue::ClampedSiluMul;
}

// A block holds for each kv head a panel of keys (tokens are columns), one of values (dimensions are columns), and the scales if there
// are any: 16 of keys, 16 of values. All but f32 and bf16 are widened before they are multiplied, f16 to f32 and the others to bf16,
// which has every value of theirs.
constexpr int kv_bits(KvType kv) {
    return kv == KvType::F32 ? 32 : kv == KvType::BF16 || kv == KvType::F16 ? 16 : kv == KvType::I4 ? 4 : 8;
}
constexpr bool kv_scaled(KvType kv) { return kv == KvType::E4M3Scaled || kv == KvType::I8 || kv == KvType::I4; }
constexpr bool kv_widened(KvType kv) { return kv != KvType::F32 && kv != KvType::BF16; }
constexpr Act kv_arithmetic(KvType kv) { return kv == KvType::F32 || kv == KvType::F16 ? Act::F32 : Act::BF16; }
constexpr int64_t kv_panel_bytes(KvType kv, int head_dim) { return (int64_t)head_dim * kBlock * kv_bits(kv) / 8; }
constexpr int64_t kv_head_bytes(KvType kv, int head_dim) { return 2 * kv_panel_bytes(kv, head_dim) + (kv_scaled(kv) ? kPanelRowBytes : 0); }

inline int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }
inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// A packed weight as kernels see it. w[column][k] = scale * (code - zero) + minimum for W8 and W4, scale * table[code] for Lut4 and
// Lut4F, scale * the 8-bit float for E4M3 and E5M2.
struct WeightView {
    Form form = Form::F32;
    int64_t columns = 0;         // packed columns, a multiple of kColumnTile
    int64_t k = 0;               // real k
    int64_t k_padded = 0;        // multiple of kKPad
    const uint8_t* data = nullptr;
    int64_t panel_bytes = 0;     // bytes from one panel of 16 columns to the next
    int group = 0;               // k per scale (all forms with codes)
    int zero = 0;
    bool scale_f16 = false;
    const void* scales = nullptr;    // [columns/16][groups][16], f16 or f32
    const void* minimums = nullptr;  // the same shape, or null
    int64_t groups = 0;
    alignas(16) float table[16] = {};        // Lut4, Lut4F
    alignas(16) uint8_t table_bytes[16] = {};  // Lut4: the integers plus 128
    int rotation = 0;                // k is rotated in blocks of this many (Hadamard), activations alike; 0: not
};

// Activations of `rows` rows: f32, bf16, or int8 with one scale per group of 16, 32 or a multiple of 64 and the sums that the affine
// forms need.
struct ActView {
    Act form = Act::F32;
    int64_t width = 0;           // padded elements per row
    uint8_t* data = nullptr;
    int group = 32;
    int rotation = 0;            // int8: blocks of this many go through a Hadamard rotation before they are quantised; 0: none
    float* scales = nullptr;     // [rows][width/group]
    float* scaled_sums = nullptr;  // scale * sum of the codes of the group
    int32_t* sums = nullptr;     // sum of the codes of the group
    int64_t row_bytes() const { return width * (form == Act::F32 ? 4 : form == Act::BF16 ? 2 : 1); }
    int64_t groups() const { return width / group; }
};

struct LinearArgs {
    WeightView w;
    ActView a;
    int64_t rows = 0;
    const float* bias = nullptr;   // packed column order, padded, or null
    Epilogue epilogue = Epilogue::Store;
    float alpha = 1.702f, limit = 7.0f;  // of ClampedSiluMul
    ActView out;                   // Store/Add: f32 out with out.width as row stride; *Mul: half the packed columns
    int64_t out_columns = 0;       // real columns written for f32 output
    int row_tile = 0;              // rows per tile
    int column_tile = 0;           // packed columns per tile
    int64_t row_tiles = 0, column_tiles = 0;
    int64_t streams = 1;           // regions of columns whose tiles are claimed in turn, one per thread
};

struct EmbedArgs {
    WeightView w;
    const int32_t* tokens = nullptr;  // or positions
    int64_t offset = 0;               // added to them
    float* out = nullptr;
    int64_t out_stride = 0;
    float scale = 1.0f;
};

struct NormArgs {
    const float* x = nullptr;
    int64_t x_stride = 0;
    const int32_t* gather = nullptr;  // row indices into x, or null
    int64_t width = 0;
    const float* weight = nullptr;    // null: no normalisation, only conversion
    const float* bias = nullptr;      // layer norm only, may be null
    const int32_t* order = nullptr;   // conversion only: element i of the output is element order[i] of the row; or null
    float eps = 0.0f;
    bool layer = false;
    ActView out;
};

struct RopeArgs {
    const float* qkv = nullptr;       // [tokens][stride]: q heads, k heads, v heads
    int64_t stride = 0;
    int q_heads = 0, kv_heads = 0, head_dim = 0, rope_dim = 0;  // rope_dim 0: no rotation
    const float* cos = nullptr;       // [positions][rope_dim/2]
    const float* sin = nullptr;
    const float* q_norm = nullptr;    // [head_dim], or of all heads with wide_norms; or null
    const float* k_norm = nullptr;
    int q_norm_stride = 0, k_norm_stride = 0;  // from a head's weights to the next one's; 0: all have the same
    float norm_eps = 0.0f;
    bool norm_layer = false;          // layer norm, else RMS norm
    bool wide_norms = false;          // one norm over all heads of q, one over all of k
    bool norm_after = false;          // after the rotation, not before
    const float* q_factors = nullptr;  // [positions] that queries are multiplied with, or null
    const int32_t* positions = nullptr;
    const int32_t* slots = nullptr;   // block * kBlock + offset, per token
    uint8_t* q_out = nullptr;         // [tokens][q_heads*head_dim]
    Act q_form = Act::BF16;           // bf16 or f32, as kv_arithmetic() says
    uint8_t* pool = nullptr;          // this layer's part of the first block
    KvType kv = KvType::BF16;
    float k_scale = 1.0f, v_scale = 1.0f;  // of fp8: what is stored is a code of x / scale
    int64_t block_bytes = 0;          // from block to block: all layers of one
};

// The first position that a token at `position` sees: of its window of as many, or of the chunk of as many it is in.
constexpr int first_seen(int window, bool chunked, int position) {
    if (window <= 0) return 0;
    if (chunked) return position - position % window;
    return position - window + 1 > 0 ? position - window + 1 : 0;
}

// Rows [token_begin, token_end) of the step, of one sequence, against spans [span_begin, span_end).
struct AttentionPiece {
    int32_t sequence = 0;
    int32_t token_begin = 0, token_end = 0;
    int32_t span_begin = 0, span_end = 0;
    int32_t last = 0;  // position of its last row
};

// Attention that one thread computes: pieces one after another, for kv heads [head_begin, head_end). partial < 0: the result goes to
// the output. Else there is one piece, and the state of each span goes to slot
// partial + ((span - first_span) * tokens + token - token_begin) * q_heads + q_head, for the merge operation.
struct AttentionItem {
    const AttentionPiece* piece = nullptr;
    int32_t pieces = 0;
    // Leading chunks that all pieces have in the same blocks, and see whole: they are read once for all rows, at most kAttentionRows
    // of a kv head. A piece begins at its first span then.
    int32_t shared_chunks = 0;
    int32_t head_begin = 0, head_end = 0;
    int32_t partial = -1;
    int32_t first_span = 0;
};

struct AttentionArgs {
    const uint8_t* q = nullptr;       // as RopeArgs::q_out
    Act q_form = Act::BF16;
    const uint8_t* pool = nullptr;
    KvType kv = KvType::BF16;
    int64_t block_bytes = 0;
    int q_heads = 0, kv_heads = 0, head_dim = 0;
    float scale = 1.0f;               // that of the keys' codes included
    float v_scale = 1.0f;             // what codes of values are multiplied with
    float softcap = 0.0f;             // 0: none
    int window = 0;                   // 0: none; else a token sees the last `window` tokens, itself included
    bool chunked = false;             // a token sees those of its own chunk of `window` instead
    const float* slopes = nullptr;    // ALiBi: of each query head, divided by the scale; or null
    const int32_t* positions = nullptr;      // per token
    const float* sinks = nullptr;     // [q_heads] or null: a score (times log2(e)) that takes part in each row's softmax, without a value
    const int32_t* block_tables = nullptr;   // [sequences][table_stride]
    int64_t table_stride = 0;
    ActView out;                      // [tokens][q_heads*head_dim]
    float* partials = nullptr;        // [slot][head_dim + 2]: maximum, sum, weighted values
};

// Rows of attention state that an item holds at once (query tokens x heads of a group).
constexpr int kAttentionRows = 48;
// Rows whose state after shared chunks an item keeps at once (query tokens x heads).
constexpr int kKeptRows = 4 * kAttentionRows;
// Bytes of scratch a worker needs for attention: two states of a maximum, sums by lane and values for each row at hand and each kept
// one, the scores and probabilities of a chunk, and where it is widened its keys, values and scales.
constexpr int64_t attention_scratch_bytes(int head_dim, KvType kv) {
    const int64_t wide = kv_widened(kv) ? 2 * (int64_t)kChunk * head_dim * 4 + 2 * 4 * kChunk : 0;
    return (kAttentionRows + kKeptRows) * (int64_t)(2 * (4 + 64 + 4 * head_dim)) + kAttentionRows * (int64_t)(2 * 4 * kChunk) + wide;
}

}  // namespace octavo
