// The sampler's rules. The passes over whole rows are kernels of the instruction-set level; what is done to a few logits is here.
#include "sampler.h"

#include <algorithm>
#include <bit>
#include <limits>

#include "green_list.h"
#include "selection.h"

namespace octavo {
namespace {

constexpr float kLargest = std::numeric_limits<float>::max();

int64_t first_maximum(const float* x, const float* block_max, float maximum) {
    int64_t b = 0;
    while (block_max[b] != maximum) ++b;
    int64_t i = b * kSampleBlock;
    while (x[i] != maximum) ++i;
    return i;
}

}  // namespace

void philox4x32(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4]) noexcept {
    uint32_t c0 = counter[0], c1 = counter[1], c2 = counter[2], c3 = counter[3], k0 = key[0], k1 = key[1];
    for (int round = 0; round < 10; ++round) {
        uint64_t a = (uint64_t)0xd2511f53u * c0, b = (uint64_t)0xcd9e8d57u * c2;
        uint32_t n0 = (uint32_t)(b >> 32) ^ c1 ^ k0, n2 = (uint32_t)(a >> 32) ^ c3 ^ k1;
        c0 = n0, c1 = (uint32_t)b, c2 = n2, c3 = (uint32_t)a;
        k0 += 0x9e3779b9u, k1 += 0xbb67ae85u;
    }
    out[0] = c0, out[1] = c1, out[2] = c2, out[3] = c3;
}

double sampler_log(double x) noexcept {
    // x = 2^k * m, m in [sqrt(1/2), sqrt(2)); log m = 2 artanh(s), s = (m - 1) / (m + 1), by its series (|s| < 0.172).
    uint64_t bits = std::bit_cast<uint64_t>(x);
    int64_t k = (int64_t)(bits >> 52) - 1023;
    double m = std::bit_cast<double>((bits & 0x000fffffffffffffull) | 0x3ff0000000000000ull);
    if (m > 1.4142135623730951) m *= 0.5, ++k;
    double s = (m - 1.0) / (m + 1.0), s2 = s * s, series = 0.0;
    for (int i = 21; i >= 1; i -= 2) series = series * s2 + 1.0 / i;
    return (double)k * 0.69314718055994530942 + 2.0 * s * series;
}

// Scratch of one worker, for rows of the whole vocabulary. `padded` arrays are readable to a whole block.
struct Sampler::Worker {
    explicit Worker(int64_t vocab) {
        int64_t blocks = block_count(vocab), padded = blocks * kSampleBlock;
        for (auto* array : {&exps, &raw, &compact, &distance}) *array = std::make_unique_for_overwrite<float[]>(padded);
        for (auto* array : {&block_max, &raw_block_max, &block_sum, &maxima}) *array = std::make_unique_for_overwrite<float[]>(blocks);
        items = std::make_unique_for_overwrite<uint64_t[]>(padded + 1);
        ids = std::make_unique_for_overwrite<int32_t[]>(padded);
        bins = std::make_unique_for_overwrite<double[]>(2048);
        histogram = std::make_unique_for_overwrite<uint32_t[]>(4096);
        green = std::make_unique<GreenList>(vocab);
    }
    std::unique_ptr<float[]> exps, raw, compact, distance;
    std::unique_ptr<float[]> block_max, raw_block_max, block_sum, maxima;
    std::unique_ptr<uint64_t[]> items;
    std::unique_ptr<int32_t[]> ids;
    std::unique_ptr<double[]> bins;
    std::unique_ptr<uint32_t[]> histogram;
    std::unique_ptr<GreenList> green;
};

Sampler::Sampler(int64_t vocab, int64_t max_rows, int64_t max_top, int64_t max_workers, const std::string& level)
    : kernels_(kernel_table(level)), vocab_(vocab), max_rows_(max_rows), max_top_(max_top), max_workers_(max_workers),
      records_(max_rows), tokens_(max_rows), ranks_(max_rows), statuses_(max_rows), logprobs_(max_rows) {
    for (int64_t i = 0; i < max_workers; ++i) workers_.push_back(std::make_unique<Worker>(vocab));
}

Sampler::~Sampler() = default;

void Sampler::set_pools(const int32_t* lists, int64_t list_size, int32_t* top_ids, float* top_logprobs, int64_t top_size) noexcept {
    lists_ = lists, list_size_ = list_size;
    top_ids_ = top_ids, top_logprobs_ = top_logprobs, top_size_ = top_size;
}

// Whether every index the record leads to is inside its array: a wrong record must fail its row, not the process.
bool Sampler::valid(const SampleRecord& r) const noexcept {
    if (r.mode < (int32_t)SampleMode::Greedy || r.mode > (int32_t)SampleMode::Prompt) return false;
    if (r.num_top < -1 || r.num_top > max_top_ || r.num_top > vocab_) return false;
    if (r.num_top > 0 && (r.top_start < 0 || (int64_t)r.top_start + r.num_top > top_size_)) return false;
    if (r.mode == (int32_t)SampleMode::Prompt) return r.num_top >= 0 && r.target >= 0 && r.target < vocab_;
    if (r.mode == (int32_t)SampleMode::Random) {
        if (!(r.temperature > 1e-6f && r.temperature < 1e30f && r.top_p > 0.0f && r.typical_p > 0.0f)) return false;
        if (!(r.min_p >= 0.0f && r.min_p <= 1.0f) || r.top_k < 0) return false;
    }
    if (r.green_count < 0 || r.green_count > vocab_ || r.previous < -1 || r.previous >= vocab_) return false;
    if (r.green_count > 0 && !(r.green_delta > 0.0f && r.green_delta < 1e30f)) return false;
    return lists_valid(r);
}

bool Sampler::lists_valid(const SampleRecord& r) const noexcept {
    for (int32_t count : {r.bias_count, r.allowed_count, r.banned_count, r.penalty_count})
        if (count < 0) return false;
    if (r.allowed_count > vocab_) return false;
    int64_t bias = r.bias_count, ids = bias, penalised = r.penalty_count;
    int64_t need = 2 * bias + r.allowed_count + r.banned_count + 2 * penalised;
    if (need == 0) return true;
    if (r.list_start < 0 || r.list_start + need > list_size_) return false;
    if (penalised && !(r.repetition_penalty > 0.0f)) return false;
    const int32_t* p = lists_ + r.list_start;
    auto inside = [&](int64_t count) {
        bool fine = true;
        for (int64_t i = 0; i < count; ++i) fine &= p[i] >= 0 && p[i] < vocab_;
        return fine;
    };
    if (!inside(ids)) return false;
    p += 2 * bias;
    if (!inside((int64_t)r.allowed_count + r.banned_count + penalised)) return false;
    return true;
}

void Sampler::apply_lists(const SampleRecord& r, float* x, Worker& w) const noexcept {
    const int32_t* bias = lists_ + r.list_start;
    const int32_t* allowed = bias + 2 * (int64_t)r.bias_count;
    const int32_t* banned = allowed + r.allowed_count;
    const int32_t* penalised = banned + r.banned_count;
    const int32_t* counts = penalised + r.penalty_count;
    if (r.allowed_count) {
        for (int32_t i = 0; i < r.allowed_count; ++i) w.compact[i] = x[allowed[i]];
        std::fill(x, x + vocab_, -kInfinity);
        for (int32_t i = 0; i < r.allowed_count; ++i) x[allowed[i]] = w.compact[i];
    }
    for (int32_t i = 0; i < r.bias_count; ++i) x[bias[i]] += std::bit_cast<float>(bias[r.bias_count + i]);
    for (int32_t i = 0; i < r.banned_count; ++i) x[banned[i]] = -kInfinity;
    for (int32_t i = 0; i < r.penalty_count; ++i) {
        float value = x[penalised[i]];
        value = value > 0.0f ? value / r.repetition_penalty : value * r.repetition_penalty;
        if (counts[i] > 0) value = (value - r.frequency_penalty * (float)counts[i]) - r.presence_penalty;
        x[penalised[i]] = value;
    }
}

void Sampler::report_top(const SampleRecord& r, const float* x, double log_sum, float maximum, Worker& w) noexcept {
    int64_t k = r.num_top;
    float floor = k < vocab_ ? floor_of(x, vocab_, k, w.block_max.get(), w.maxima.get(), w.histogram.get()) : -kInfinity;
    uint64_t* keys = w.items.get();
    int64_t count = gather(x, vocab_, floor, w.block_max.get(), keys);
    if (k < count) std::nth_element(keys, keys + k, keys + count);
    std::sort(keys, keys + k);
    for (int64_t i = 0; i < k; ++i) {
        int64_t id = key_id(keys[i]);
        top_ids_[r.top_start + i] = (int32_t)id;
        top_logprobs_[r.top_start + i] = (float)((double)(x[id] - maximum) - log_sum);
    }
}

// What is left to draw from: exps of logits, over the whole vocabulary or over `ids`; 0 where a rule has taken a token out.
struct Sampler::Choices {
    const KernelTable& kernels;
    const float* row;  // the logits of the whole vocabulary
    float maximum, scale;
    float* exps;
    float* block_sum;
    int64_t n;
    const float* logits = row;
    const int32_t* ids = nullptr;  // null: the whole vocabulary
    double total = 0.0;
    bool thinned = false;  // whether exps of 0 are tokens taken out, and not only improbable ones

    void keep_min_p(float min_p) {
        total = kernels.sample_keep(exps, exps, n, min_p, true, block_sum);
        thinned = true;
    }

    // The most probable tokens that reach the share top_p: a token stays when those before it have less.
    void keep_top_p(float top_p, Worker& w) {
        thinned = true;
        double target = (double)top_p * total;
        // Tokens below this together have less than what may be left out, so they and blocks of them are not looked at.
        float least = (float)((total - target) / (double)(n + 1));
        constexpr uint32_t kOne = 0x3f800000u;
        Crossing at = find_crossing(target, w.bins.get(), w.items.get(), [&](auto&& f) {
            for (int64_t b = 0, blocks = block_count(n); b < blocks; ++b) {
                if (block_sum[b] < least) continue;
                for (int64_t i = b * kSampleBlock, end = i + kSampleBlock; i < end; ++i) f(kOne - std::bit_cast<uint32_t>(exps[i]), exps[i]);
            }
        });
        if (!at.found) return;
        float threshold = std::bit_cast<float>(kOne - at.key);
        if (!(threshold > 0.0f)) return;
        total = kernels.sample_keep(exps, exps, n, threshold, true, block_sum);
        int64_t kept = 1;
        while (kept < at.ties && at.before + (double)kept * threshold < target) ++kept;
        if (kept < at.ties) drop_ties(threshold, kept);
    }

    // Of the tokens with exactly this exp, keeps the `kept` with the lowest ids.
    void drop_ties(float value, int64_t kept) {
        total = 0.0;
        for (int64_t b = 0, blocks = block_count(n); b < blocks; ++b) {
            if (block_sum[b] >= value) {
                bool changed = false;
                for (int64_t i = b * kSampleBlock, end = i + kSampleBlock; i < end; ++i) {
                    if (exps[i] != value || --kept >= 0) continue;
                    exps[i] = 0.0f, changed = true;
                }
                float* block = exps + b * kSampleBlock;
                if (changed) kernels.sample_keep(block, block, kSampleBlock, 0.0f, true, block_sum + b);  // sums it again
            }
            total += block_sum[b];
        }
    }

    // Locally typical sampling: the tokens whose information is nearest to the entropy, until they reach the share. With
    // z = (logit - maximum) * scale, |-log p - H| is |z - mean of z|.
    void keep_typical(float share, Worker& w) {
        thinned = true;
        float* distance = w.distance.get();
        int64_t padded = block_count(n) * kSampleBlock;
        double weighted_sum = 0.0;
        for (int64_t i = 0; i < padded; ++i) {
            float z = i < n && exps[i] > 0.0f ? (logits[i] - maximum) * scale : 0.0f;
            distance[i] = z;
            weighted_sum += (double)exps[i] * (double)z;
        }
        float mean = (float)(weighted_sum / total);
        for (int64_t i = 0; i < padded; ++i) {
            float d = distance[i] - mean;
            d = d < 0.0f ? -d : d;
            distance[i] = exps[i] > 0.0f ? d + 0.0f : kLargest;
        }
        Crossing at = find_crossing((double)share * total, w.bins.get(), w.items.get(), [&](auto&& f) {
            for (int64_t i = 0; i < padded; ++i) f(std::bit_cast<uint32_t>(distance[i]), exps[i]);
        });
        if (at.found) total = kernels.sample_keep(exps, distance, n, std::bit_cast<float>(at.key), false, block_sum);
    }

    // The first token whose cumulative share, in order of id, exceeds u.
    int64_t draw(double u) const {
        double target = u * total, before = 0.0;
        int64_t block = -1;
        for (int64_t b = 0, blocks = block_count(n); b < blocks; ++b) {
            if (!(block_sum[b] > 0.0f)) continue;
            if (block >= 0) before += block_sum[block];
            block = b;
            if (before + block_sum[b] > target) break;
        }
        int64_t last = -1;
        for (int64_t i = block * kSampleBlock, end = i + kSampleBlock; i < end; ++i) {
            if (!(exps[i] > 0.0f)) continue;
            last = i;
            before += exps[i];
            if (before > target) break;
        }
        return ids ? ids[last] : last;
    }
};

int64_t Sampler::choose(const SampleRecord& r, Choices& c, Worker& w, bool exps_ready) noexcept {
    const float* x = c.row;
    if (r.top_k > 0 && r.top_k < vocab_) {
        uint64_t* keys = w.items.get();
        float floor = floor_of(x, vocab_, r.top_k, w.block_max.get(), w.maxima.get(), w.histogram.get());
        int64_t count = gather(x, vocab_, floor, w.block_max.get(), keys);
        uint64_t last = ~0ull;
        if (r.top_k < count) {
            // The order nth_element leaves is not used: what is kept is gathered again by id.
            std::nth_element(keys, keys + (r.top_k - 1), keys + count);
            last = keys[r.top_k - 1];
            count = gather(x, vocab_, floor, w.block_max.get(), keys);
        }
        c.n = 0;
        for (int64_t i = 0; i < count; ++i) {
            if (keys[i] > last) continue;
            w.ids[c.n] = (int32_t)key_id(keys[i]);
            w.compact[c.n++] = x[key_id(keys[i])];
        }
        c.ids = w.ids.get(), c.logits = w.compact.get();
        exps_ready = false;
    }
    if (!exps_ready) {
        c.total = kernels_.sample_exponentials(c.logits, c.n, c.maximum, c.scale, c.exps, c.block_sum);
    } else {
        for (int64_t b = 0, blocks = block_count(c.n); b < blocks; ++b) c.total += c.block_sum[b];
    }
    if (r.min_p > 0.0f) c.keep_min_p(r.min_p);
    if (r.top_p < 1.0f) c.keep_top_p(r.top_p, w);
    if (r.typical_p < 1.0f) c.keep_typical(r.typical_p, w);
    uint32_t counter[4] = {(uint32_t)r.position, (uint32_t)((uint64_t)r.position >> 32), r.sample_index, 0};
    uint32_t key[2] = {(uint32_t)r.seed, (uint32_t)(r.seed >> 32)}, words[4];
    philox4x32(counter, key, words);
    uint64_t bits = ((uint64_t)words[1] << 32 | words[0]) >> 11;
    return c.draw((double)bits * 0x1p-53);
}

// Reports on what the token was drawn from (all of the vocabulary where it is the most probable one). Top entries that are left
// over, because no more tokens can be drawn, have id -1.
void Sampler::report_choices(const SampleRecord& r, const Choices& c, int64_t token, int64_t row, Worker& w) noexcept {
    const float* x = c.row;
    double log_sum = sampler_log(c.total);
    auto logprob = [&](int64_t id) { return (float)((double)((x[id] - c.maximum) * c.scale) - log_sum); };
    uint64_t* keys = w.items.get();
    int64_t count = 0, k = std::min<int64_t>(r.num_top, vocab_);
    if (!c.ids && !c.thinned) {
        ranks_[row] = (int32_t)kernels_.sample_rank(x, vocab_, token, w.block_max.get());
        if (k > 0) {
            float floor = k < vocab_ ? floor_of(x, vocab_, k, w.block_max.get(), w.maxima.get(), w.histogram.get()) : -kInfinity;
            count = gather(x, vocab_, floor, w.block_max.get(), keys);
        }
    } else {
        for (int64_t b = 0, blocks = block_count(c.n); b < blocks; ++b) {
            if (c.thinned && !(c.block_sum[b] > 0.0f)) continue;
            for (int64_t i = b * kSampleBlock, end = std::min(c.n, i + kSampleBlock); i < end; ++i) {
                int64_t id = c.ids ? c.ids[i] : i;
                keys[count] = order_key(x[id], id);
                count += !c.thinned || c.exps[i] > 0.0f;
            }
        }
        uint64_t own = order_key(x[token], token);
        ranks_[row] = 1 + (int32_t)std::count_if(keys, keys + count, [own](uint64_t key) { return key < own; });
    }
    logprobs_[row] = logprob(token);
    if (k <= 0) return;
    int64_t listed = std::min(k, count);
    if (listed < count) std::nth_element(keys, keys + listed, keys + count);
    std::sort(keys, keys + listed);
    for (int64_t i = 0; i < k; ++i) {
        int64_t id = i < listed ? key_id(keys[i]) : -1;
        float value = id < 0 ? -kInfinity : logprob(id);
        top_ids_[r.top_start + i] = value >= -kLargest ? (int32_t)id : -1;
        top_logprobs_[r.top_start + i] = value;
    }
}

SampleStatus Sampler::run(const SampleRecord& r, float* x, Worker& w, int64_t row) noexcept {
    float maximum;
    if (!kernels_.sample_scan(x, vocab_, w.block_max.get(), &maximum)) return SampleStatus::NonFinite;
    if (maximum == -kInfinity) return SampleStatus::NothingLeft;
    bool prompt = r.mode == (int32_t)SampleMode::Prompt;
    bool lists = !prompt && (r.bias_count | r.allowed_count | r.banned_count | r.penalty_count) != 0;
    bool green = !prompt && r.green_count > 0 && r.previous >= 0;
    bool processed = !prompt && r.num_top >= 0 && r.processed;
    bool exps_ready = false;
    const float* raw = x;
    const float* raw_block_max = w.block_max.get();
    float raw_maximum = maximum;
    double log_sum = 0.0;
    if (r.num_top >= 0 && !processed) {
        // At temperature 1 with nothing to change these are also what is drawn from.
        exps_ready = r.mode == (int32_t)SampleMode::Random && r.temperature == 1.0f && !lists && !green;
        float* exps = exps_ready ? w.exps.get() : nullptr;
        log_sum = sampler_log(kernels_.sample_exponentials(x, vocab_, maximum, 1.0f, exps, w.block_sum.get()));
        if (r.num_top > 0) report_top(r, x, log_sum, maximum, w);
        if (lists || green) {
            std::copy(x, x + vocab_, w.raw.get());
            std::copy(w.block_max.get(), w.block_max.get() + block_count(vocab_), w.raw_block_max.get());
            raw = w.raw.get(), raw_block_max = w.raw_block_max.get();
        }
    }
    int64_t token = r.target;
    if (!prompt) {
        if (green) {
            const int32_t* ids = w.green->select(r.previous, r.green_count);
            for (int32_t i = 0; i < r.green_count; ++i) x[ids[i]] += r.green_delta;
        }
        if (lists) apply_lists(r, x, w);
        if (lists || green) {
            if (!kernels_.sample_scan(x, vocab_, w.block_max.get(), &maximum)) return SampleStatus::NonFinite;
            if (maximum == -kInfinity) return SampleStatus::NothingLeft;
        }
        bool greedy = r.mode == (int32_t)SampleMode::Greedy;
        Choices choices{kernels_, x, maximum, greedy ? 1.0f : 1.0f / r.temperature, w.exps.get(), w.block_sum.get(), vocab_};
        token = greedy ? first_maximum(x, w.block_max.get(), maximum) : choose(r, choices, w, exps_ready);
        if (processed) {
            if (greedy) choices.total = kernels_.sample_exponentials(x, vocab_, maximum, 1.0f, nullptr, w.block_sum.get());
            report_choices(r, choices, token, row, w);
        }
    }
    tokens_[row] = (int32_t)token;
    if (r.num_top >= 0 && !processed) {
        logprobs_[row] = (float)((double)(raw[token] - raw_maximum) - log_sum);
        ranks_[row] = (int32_t)kernels_.sample_rank(raw, vocab_, token, raw_block_max);
    }
    return SampleStatus::Ok;
}

void Sampler::sample_row(int64_t row, float* logits, int64_t worker) noexcept {
    if (row < 0 || row >= max_rows_ || worker < 0 || worker >= max_workers_) return;
    tokens_[row] = -1, ranks_[row] = 0, logprobs_[row] = std::numeric_limits<float>::quiet_NaN();
    const SampleRecord& record = records_[row];
    statuses_[row] = (int32_t)(valid(record) ? run(record, logits, *workers_[worker], row) : SampleStatus::BadRecord);
}

}  // namespace octavo
