// The sampler: one row of logits in, one token out (and its log-probabilities), by the parameters in that row's record.
//
// A row's result depends on its record, its lists and its logits only: every sum has a fixed order, exp and log are this
// file's own, and random numbers come from Philox4x32-10, so neither the row's index, nor the worker, nor what else is in
// the batch, nor the CPU changes a bit.
//
// Random numbers: key = seed (low, high word); counter = (position low, position high, sample index, 0). The first two
// output words, second word high, give 53 bits: u in [0, 1).
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace octavo {

struct KernelTable;

enum class SampleMode : int32_t { Idle = 0, Greedy = 1, Random = 2, Prompt = 3 };
enum class SampleStatus : int32_t { Ok = 0, NonFinite = 1, NothingLeft = 2, BadRecord = 3 };

// What Python writes for a row: 128 bytes, little endian, no padding. octavo/sampling/rows.py packs the same layout.
struct SampleRecord {
    uint64_t seed;
    int64_t position;       // of the token to sample: the number of tokens before it
    uint32_t sample_index;  // which of the n answers of a request
    int32_t mode;           // SampleMode
    float temperature;
    float top_p;      // >= 1: off
    float min_p;      // 0: off
    float typical_p;  // >= 1: off
    int32_t top_k;    // 0: off
    float repetition_penalty, presence_penalty, frequency_penalty;
    int32_t num_top;  // most probable tokens to report; 0: the chosen one only; -1: no log-probabilities
    int32_t target;   // Prompt mode: the token to report
    int32_t top_start;  // where in the top pool this row's entries go
    // The row's lists lie one after another in the list pool from list_start on: bias ids, bias values (float bits),
    // allowed ids, banned ids, penalised ids, their counts in the output (0: in the prompt only).
    int32_t list_start, bias_count, allowed_count, banned_count, penalty_count;
    // Watermark: `green_delta` is added to the logits of the first `green_count` tokens of the green list that follows
    // `previous`, before anything else. Off where green_count is 0 or previous is -1.
    int32_t previous, green_count;
    float green_delta;
    int32_t processed;  // 0: log-probabilities of the logits as they came; 1: of what the token is drawn from
    int32_t reserved[6];
};
static_assert(sizeof(SampleRecord) == 128);

// Philox4x32-10 (Salmon et al. 2011): out = the four words of block `counter` under `key`.
void philox4x32(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4]) noexcept;
// The sampler's own natural logarithm of a positive normal number.
double sampler_log(double x) noexcept;

class Sampler {
public:
    // `level`: an instruction-set level (empty: the best one here); it changes how long sampling takes and no result.
    Sampler(int64_t vocab, int64_t max_rows, int64_t max_top, int64_t max_workers, const std::string& level = {});
    Sampler(const Sampler&) = delete;
    Sampler& operator=(const Sampler&) = delete;
    ~Sampler();

    int64_t vocab() const noexcept { return vocab_; }
    int64_t max_rows() const noexcept { return max_rows_; }
    int64_t max_top() const noexcept { return max_top_; }
    int64_t max_workers() const noexcept { return max_workers_; }

    // Filled before a step.
    SampleRecord* records() noexcept { return records_.data(); }
    // The pools belong to the caller, who keeps them alive and replaces them between steps only.
    void set_pools(const int32_t* lists, int64_t list_size, int32_t* top_ids, float* top_logprobs, int64_t top_size) noexcept;

    // Samples (or, in Prompt mode, reports) row `row` from `logits[0, vocab)`, which it may change. Safe to call at the same
    // time for distinct rows with distinct workers. Allocates nothing.
    void sample_row(int64_t row, float* logits, int64_t worker) noexcept;

    // Read after a step.
    int32_t* tokens() noexcept { return tokens_.data(); }
    float* logprobs() noexcept { return logprobs_.data(); }
    int32_t* ranks() noexcept { return ranks_.data(); }
    int32_t* statuses() noexcept { return statuses_.data(); }

private:
    struct Worker;
    struct Choices;

    bool valid(const SampleRecord& record) const noexcept;
    bool lists_valid(const SampleRecord& record) const noexcept;
    SampleStatus run(const SampleRecord& record, float* logits, Worker& worker, int64_t row) noexcept;
    void apply_lists(const SampleRecord& record, float* logits, Worker& worker) const noexcept;
    int64_t choose(const SampleRecord& record, Choices& choices, Worker& worker, bool exps_ready) noexcept;
    void report_top(const SampleRecord& record, const float* logits, double log_sum, float maximum, Worker& worker) noexcept;
    void report_choices(const SampleRecord& record, const Choices& choices, int64_t token, int64_t row, Worker& worker) noexcept;

    const KernelTable& kernels_;
    int64_t vocab_, max_rows_, max_top_, max_workers_;
    std::vector<SampleRecord> records_;
    std::vector<int32_t> tokens_, ranks_, statuses_;
    std::vector<float> logprobs_;
    const int32_t* lists_ = nullptr;
    int64_t list_size_ = 0;
    int32_t* top_ids_ = nullptr;
    float* top_logprobs_ = nullptr;
    int64_t top_size_ = 0;
    std::vector<std::unique_ptr<Worker>> workers_;
};

}  // namespace octavo
