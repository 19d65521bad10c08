// How the attention of a step is split into items: which rows are computed together, by whom, and what is merged afterwards.
#pragma once
#include <vector>

#include "common.h"

namespace octavo {

// The sequences of a step as attention sees them.
struct AttentionStep {
    int64_t sequences = 0;
    const int32_t* starts = nullptr;   // positions before the step's, per sequence
    const int32_t* counts = nullptr;   // positions of the step
    const int32_t* tables = nullptr;   // [sequences][stride] blocks
    int64_t stride = 0;
    int threads = 1;
};

// A token whose states of several spans are merged, as KernelTable::attention_merge says.
struct AttentionMerge {
    int32_t token, partial, spans, tokens;
};

// The work of one attention operation; shared by all layers with the same window and head shape.
class AttentionWork {
  public:
    // bidirectional: every token sees the whole sequence, all of which is in the step.
    AttentionWork(int window, bool chunked, int q_heads, int kv_heads, bool bidirectional)
        : window_(window), chunked_(chunked), q_heads_(q_heads), kv_heads_(kv_heads), bidirectional_(bidirectional) {}
    bool serves(int window, bool chunked, int q_heads, int kv_heads, bool bidirectional) const {
        return window_ == window && chunked_ == chunked && q_heads_ == q_heads && kv_heads_ == kv_heads && bidirectional_ == bidirectional;
    }

    // Splits a step. That changes who computes what, never an order of summation. `partial_slots`: states there is room for.
    void build(const AttentionStep& step, int64_t partial_slots);

    const std::vector<AttentionItem>& items() const { return items_; }
    const std::vector<AttentionMerge>& merges() const { return merges_; }
    // Tokens of the pool that a piece reads by itself, and that all pieces of an item read together.
    static int64_t own_tokens(const AttentionItem& item, const AttentionPiece& piece);
    static int64_t shared_tokens(const AttentionItem& item) { return (int64_t)item.shared_chunks * kChunk; }

  private:
    struct Run {
        size_t begin, end;  // of joined_
        int32_t chunks;
    };
    void find_runs(const AttentionStep& step);
    void add(const AttentionItem& item, bool split_heads);

    int window_;
    bool chunked_;
    int q_heads_, kv_heads_;
    bool bidirectional_;
    std::vector<AttentionPiece> pieces_;
    std::vector<AttentionItem> items_;
    std::vector<AttentionMerge> merges_;
    std::vector<size_t> first_piece_;      // per item
    std::vector<AttentionPiece> joined_;   // of sequences with few rows
    std::vector<Run> runs_;
};

}  // namespace octavo
