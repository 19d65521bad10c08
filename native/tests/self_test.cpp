// A program that checks the kernels of every level of this machine against plain double arithmetic, for processors without a
// Python to run the tests with: linears in all forms, norms, quantisation, rope and attention; bits with 1 to 3 threads.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <string>
#include <vector>

#include "half.h"
#include "plan.h"

using namespace octavo;

namespace {

int failures = 0;

void check(bool ok, const std::string& what) {
    if (ok) return;
    ++failures;
    std::printf("FAILED: %s\n", what.c_str());
}

// Deterministic numbers about evenly spread over -1 .. 1.
struct Numbers {
    uint64_t state;
    float next() {
        state = state * 6364136223846793005ull + 1442695040888963407ull;
        return (float)(int32_t)(state >> 32) / 2147483648.0f;
    }
    std::vector<float> many(int64_t count) {
        std::vector<float> values((size_t)count);
        for (float& v : values) v = next();
        return values;
    }
};

// Values one after another in an arena.
struct Layout {
    int64_t rows, size = 0;
    int64_t take(int64_t bytes) {
        const int64_t at = size;
        size += round_up(bytes, 64);
        return at;
    }
    Activation value(Act form, int64_t width, int group = 32, int rotation = 0) {
        Activation a;
        a.form = form;
        a.width = width;
        a.group = group;
        a.rotation = rotation;
        a.data = take(rows * Activation::row_bytes(form, width));
        if (form == Act::I8)
            for (int64_t* part : {&a.scales, &a.scaled_sums, &a.sums}) *part = take(rows * width / group * 4);
        return a;
    }
};

template <class T>
T* at(Plan& plan, int64_t offset) {
    return (T*)(plan.arena() + offset);
}

void run(Plan& plan, int rows) {
    plan.starts[0] = 0;
    plan.counts[0] = rows;
    plan.run(1, 0, nullptr, nullptr);
}

// The number that element i of row r of a value stands for.
double element(Plan& plan, const Activation& a, int64_t r, int64_t i) {
    if (a.form == Act::F32) return at<float>(plan, a.data)[r * a.width + i];
    if (a.form == Act::BF16) return float_from_bf16(at<uint16_t>(plan, a.data)[r * a.width + i]);
    return (double)at<int8_t>(plan, a.data)[r * a.width + i] * at<float>(plan, a.scales)[(r * a.width + i) / a.group];
}

struct WeightCase {
    const char* name;
    Form form;
    int group, zero;
    bool minimum, scale_f16;
    int rotation = 0;
    int act_group = 32;
};

constexpr WeightCase kWeights[] = {
    {"f32", Form::F32, 0, 0, false, false},
    {"bf16", Form::BF16, 0, 0, false, false},
    {"w8 group 32", Form::W8, 32, 128, false, true},
    {"w8 rotated", Form::W8, 32, 128, false, true, 32},
    {"w8 group 16", Form::W8, 16, 128, false, false, 0, 16},
    {"w8 per column", Form::W8, 0, 117, false, false},
    {"w8 minimum", Form::W8, 64, 0, true, true},
    {"w4 group 32", Form::W4, 32, 8, false, true},
    {"w4 minimum", Form::W4, 32, 0, true, true},
    {"w4 minimum group 16", Form::W4, 16, 0, true, false, 0, 16},
    {"w8 wide 64", Form::W8, 64, 128, false, true, 64, 64},
    {"w8 wide 192", Form::W8, 192, 128, false, true, 64, 192},
    {"w8 wide not rotated", Form::W8, 192, 117, false, false, 0, 64},
    {"w4 per column", Form::W4, 0, 8, false, false},
    {"lut4 group 32", Form::Lut4, 32, 0, false, true},
    {"lut4 group 16", Form::Lut4, 16, 0, false, false, 0, 16},
    {"lut4 floats", Form::Lut4F, 64, 0, false, false},
    {"e4m3 group 64", Form::E4M3, 64, 0, false, true},
    {"e5m2 per column", Form::E5M2, 0, 0, false, false},
};

constexpr int kColumns = 70, kK = 192, kRows = 130;

std::shared_ptr<PackedWeight> make_weight(const WeightCase& c) {
    auto region = std::make_shared<Region>(PackedWeight::bytes_needed(c.form, kColumns, kK, c.group, c.minimum, c.scale_f16));
    float table[16];
    for (int i = 0; i < 16; ++i) table[i] = c.form == Form::Lut4 ? (float)(16 * i - 120) : 0.1f * (float)(i - 7);
    auto weight = std::make_shared<PackedWeight>(region, c.form, kColumns, kK, c.group, c.zero, c.minimum, c.scale_f16, c.rotation,
                                                 is_lut4(c.form) ? table : nullptr);
    std::vector<int32_t> target(kColumns);
    std::iota(target.begin(), target.end(), 0);
    Numbers numbers{1};
    const auto values = numbers.many(kColumns * kK);
    if (c.form == Form::F32 || c.form == Form::BF16) {
        weight->pack_f32(target.data(), kColumns, values.data());
        return weight;
    }
    std::vector<uint8_t> codes(values.size());
    // Of 8-bit floats up to 119: both formats have numbers of a moderate size there.
    const float largest = c.form == Form::W8 ? 255.0f : is_float8(c.form) ? 119.0f : 15.0f;
    for (size_t i = 0; i < codes.size(); ++i) codes[i] = (uint8_t)std::lround((values[i] + 1.0f) / 2.0f * largest);
    const int64_t groups = ceil_div(kK, c.group ? c.group : kK);
    auto scales = numbers.many(kColumns * groups), minimums = numbers.many(kColumns * groups);
    for (float& s : scales) s = (s + 2.0f) / largest;
    if (is_table(c.form)) {
        weight->pack_codes(target.data(), kColumns, codes.data(), scales.data());
        return weight;
    }
    weight->pack_affine(target.data(), kColumns, codes.data(), scales.data(), c.minimum ? minimums.data() : nullptr);
    return weight;
}

// A conversion of the input into the form the weight wants, then the linear; against double, and bit for bit among batches.
void test_linear(const std::string& level, const WeightCase& c) {
    const std::string name = level + " linear " + c.name;
    const auto weight = make_weight(c);
    const auto input = Numbers{2}.many(kRows * kK);
    const Act form = activations_of(c.form);
    std::vector<float> columns((size_t)kColumns * kK), expected;
    for (int n = 0; n < kColumns; ++n) weight->column(n, columns.data() + (size_t)n * kK);
    for (int threads : {1, 2, 3}) {
        Layout layout{kRows};
        const Activation x = layout.value(Act::F32, kK), q = layout.value(form, kK, c.act_group, c.rotation);
        const Activation out = layout.value(Act::F32, kColumns);
        Plan plan(level, threads, {kRows, 1, ceil_div(kRows, kBlock), 1, 1}, layout.size);
        plan.add_norm("convert", x, kK, {}, {}, 0.0f, false, q, false);
        plan.add_linear("linear", weight, q, {}, Epilogue::Store, out, kColumns);
        for (int rows : {kRows, 1, 2, 3, 5, 7, 16, 33, 97}) {
            std::memcpy(at<float>(plan, x.data), input.data(), (size_t)rows * kK * 4);
            run(plan, rows);
            const float* found = at<float>(plan, out.data);
            if (expected.empty()) {
                expected.assign(found, found + kRows * kColumns);
                for (int r = 0; r < rows; ++r)
                    for (int n = 0; n < kColumns; ++n) {
                        double sum = 0, magnitude = 0;
                        for (int k = 0; k < kK; ++k) {
                            const double term = element(plan, q, r, k) * columns[(size_t)n * kK + k];
                            sum += term;
                            magnitude += std::fabs(term);
                        }
                        if (std::fabs(found[r * kColumns + n] - sum) > 4e-6 * magnitude + 1e-6)
                            return check(false, name + ": row " + std::to_string(r) + " column " + std::to_string(n));
                    }
            }
            check(std::memcmp(found, expected.data(), (size_t)rows * kColumns * 4) == 0,
                  name + ": bits of " + std::to_string(rows) + " rows with " + std::to_string(threads) + " threads");
        }
    }
}

void test_norm(const std::string& level, Act form, int group, bool layer) {
    constexpr int kWidth = 100, kPadded = 128, kCount = 9;
    const std::string name = level + (layer ? " layer norm" : " rms norm") + " to form " + std::to_string((int)form);
    Numbers numbers{3};
    const auto input = numbers.many(kCount * kWidth), weight = numbers.many(kWidth), bias = layer ? numbers.many(kWidth) : std::vector<float>{};
    Layout layout{kCount};
    const Activation x = layout.value(Act::F32, kWidth), out = layout.value(form, kPadded, group);
    Plan plan(level, 2, {kCount, 1, 1, 1, 1}, layout.size);
    plan.add_norm("norm", x, kWidth, weight, bias, 1e-5f, layer, out, false);
    std::memcpy(at<float>(plan, x.data), input.data(), input.size() * 4);
    run(plan, kCount);
    for (int r = 0; r < kCount; ++r) {
        const float* row = input.data() + r * kWidth;
        double mean = 0, squares = 0;
        for (int i = 0; i < kWidth && layer; ++i) mean += row[i] / (double)kWidth;
        for (int i = 0; i < kWidth; ++i) squares += (row[i] - mean) * (row[i] - mean);
        const double scale = 1 / std::sqrt(squares / kWidth + 1e-5);
        for (int i = 0; i < kPadded; ++i) {
            const double y = i < kWidth ? (row[i] - mean) * scale * weight[i] + (layer ? bias[i] : 0) : 0;
            // An int8 group is off by half a step at the most; its largest number has the code 127.
            const double step = form == Act::I8 ? at<float>(plan, out.scales)[(r * kPadded + i) / group] : 0;
            const double allowed = form == Act::F32 ? 2e-6 : form == Act::BF16 ? std::fabs(y) / 256 + 2e-6 : 0.501 * step + 2e-6;
            if (std::fabs(element(plan, out, r, i) - y) > allowed) return check(false, name + ": element " + std::to_string(i));
        }
    }
    if (form != Act::I8) return;
    for (int g = 0; g < kCount * kPadded / group; ++g) {
        int sum = 0;
        for (int i = 0; i < group; ++i) sum += at<int8_t>(plan, out.data)[g * group + i];
        const float scaled = at<float>(plan, out.scales)[g] * (float)sum;
        check(at<int32_t>(plan, out.sums)[g] == sum && at<float>(plan, out.scaled_sums)[g] == scaled, name + ": sums");
    }
}

// Rope, append and attention over 600 tokens: in one step and cut in pieces the same bits, and the numbers of a plain softmax.
void test_attention(const std::string& level, KvType kv, int window) {
    constexpr int kTokens = 600, kHeads = 4, kKvHeads = 2, kDim = 32, kHalf = kDim / 2, kWidth = (kHeads + 2 * kKvHeads) * kDim;
    constexpr int kBlocks = kTokens / kBlock + 1;
    const std::string name = level + " attention, KV type " + std::to_string((int)kv) + " window " + std::to_string(window);
    const auto input = Numbers{4}.many((int64_t)kTokens * kWidth);
    std::vector<float> cos((size_t)kBlocks * kBlock * kHalf), sin(cos.size()), expected;
    for (size_t i = 0; i < cos.size(); ++i) {
        const double angle = (double)(i / kHalf) / std::pow(500.0, (double)(i % kHalf) / kHalf);
        cos[i] = (float)std::cos(angle), sin[i] = (float)std::sin(angle);
    }
    const std::vector<std::vector<int>> cuts = {{kTokens}, {17, 64, 513, kTokens}, {500, 598, 599, kTokens}};
    for (size_t which = 0; which < cuts.size(); ++which) {
        Layout layout{kTokens};
        const Activation x = layout.value(Act::F32, kWidth), q = layout.value(kv_arithmetic(kv), kHeads * kDim);
        const Activation out = layout.value(Act::F32, kHeads * kDim);
        Plan plan(level, (int)which + 1, {kTokens, 1, kBlocks, 1, 1}, layout.size);
        const int tables = plan.add_rope_tables(cos.data(), sin.data(), (int64_t)cos.size());
        plan.add_rope("rope", x, 0, kHeads, kKvHeads, kDim, kDim, tables, {}, {}, 0.0f, q);
        plan.add_attention("attention", q, 0, kHeads, kKvHeads, kDim, 0.5f, 0.0f, window, out);
        plan.make_pool(kBlocks, kv, {});
        for (int b = 0; b < kBlocks; ++b) plan.block_tables[(size_t)b] = (int32_t)((b * 5 + (int)which) % kBlocks);
        std::vector<float> found;
        for (int start = 0; int end : cuts[which]) {
            plan.starts[0] = start, plan.counts[0] = end - start;
            std::memcpy(at<float>(plan, x.data), input.data() + (size_t)start * kWidth, (size_t)(end - start) * kWidth * 4);
            plan.run(1, 0, nullptr, nullptr);
            const float* rows = at<float>(plan, out.data);
            found.insert(found.end(), rows, rows + (end - start) * kHeads * kDim);
            start = end;
        }
        if (which == 0) expected = found;
        check(found.size() == expected.size() && std::memcmp(found.data(), expected.data(), found.size() * 4) == 0,
              name + ": bits of cut " + std::to_string(which));
    }
    auto rotated = [&](int token, int head, std::vector<double>& to) {
        const float* from = input.data() + (size_t)token * kWidth + head * kDim;
        for (int i = 0; i < kHalf; ++i) {
            const double c = cos[(size_t)token * kHalf + i], s = sin[(size_t)token * kHalf + i];
            to[i] = from[i] * c - from[kHalf + i] * s;
            to[kHalf + i] = from[kHalf + i] * c + from[i] * s;
        }
    };
    constexpr double allowed[kKvTypes] = {2e-5, 4e-2, 5e-3, 0.3, 0.5, 0.3, 5e-2, 1.0};
    std::vector<double> query(kDim), key(kDim), scores(kTokens);
    for (int token : {0, 15, 16, 63, 64, 300, 511, 512, 599})
        for (int head = 0; head < kHeads; ++head) {
            const int kv_head = head / (kHeads / kKvHeads), first = window && token >= window ? token - window + 1 : 0;
            rotated(token, head, query);
            double largest = -1e300, sum = 0;
            for (int t = first; t <= token; ++t) {
                rotated(t, kHeads + kv_head, key);
                scores[t] = 0.5 * std::inner_product(query.begin(), query.end(), key.begin(), 0.0);
                largest = std::fmax(largest, scores[t]);
            }
            for (int t = first; t <= token; ++t) sum += scores[t] = std::exp(scores[t] - largest);
            for (int i = 0; i < kDim; ++i) {
                double value = 0, magnitude = 0;
                for (int t = first; t <= token; ++t) {
                    const double v = scores[t] / sum * input[(size_t)t * kWidth + (kHeads + kKvHeads + kv_head) * kDim + i];
                    value += v, magnitude += std::fabs(v);
                }
                const double error = std::fabs(expected[((size_t)token * kHeads + head) * kDim + i] - value);
                // Integers have the step of their vector's largest number (four bits that of all of it, as it is rotated).
                if (error > allowed[(int)kv] * magnitude + (kv == KvType::I4 ? 0.1 : kv == KvType::I8 ? 5e-3 : 1e-6))
                    return check(false, name + ": token " + std::to_string(token) + " off by " + std::to_string(error));
            }
        }
}

// The sampler's passes over a row: the portable level's bits.
void test_sampling(const std::string& level) {
    const KernelTable &kernels = kernel_table(level), &portable = kernel_table("portable");
    const auto values = Numbers{5}.many(3 * kSampleBlock);
    for (int64_t n : {int64_t{1}, kSampleBlock - 1, 2 * kSampleBlock, 2 * kSampleBlock + 17}) {
        const std::string name = level + " sampling of " + std::to_string(n);
        std::vector<float> x(values.begin(), values.begin() + n);
        for (float& v : x) v *= 20.0f;
        float maxima[2] = {};
        double totals[2] = {}, kept[2] = {};
        int64_t ranks[2] = {};
        std::vector<float> exps[2], sums[2];
        for (int which : {0, 1}) {
            const KernelTable& table = which ? kernels : portable;
            exps[which].resize(3 * kSampleBlock), sums[which].resize(6);
            check(table.sample_scan(x.data(), n, sums[which].data() + 3, &maxima[which]), name + ": finite");
            ranks[which] = table.sample_rank(x.data(), n, n / 2, sums[which].data() + 3);
            totals[which] = table.sample_exponentials(x.data(), n, maxima[which], 0.7f, exps[which].data(), sums[which].data());
            kept[which] = table.sample_keep(exps[which].data(), exps[which].data(), n, 1e-3f, true, sums[which].data());
        }
        check(maxima[0] == maxima[1] && totals[0] == totals[1] && kept[0] == kept[1] && ranks[0] == ranks[1], name + ": values");
        check(exps[0] == exps[1] && sums[0] == sums[1], name + ": bits");
        double total = 0.0;
        for (float v : x) total += std::exp(0.7 * ((double)v - maxima[1]));
        check(std::fabs(totals[1] - total) < 1e-5 * total, name + ": sum");
        x[(size_t)n - 1] = NAN;
        check(!kernels.sample_scan(x.data(), n, sums[1].data(), &maxima[1]), name + ": a NaN");
    }
}

}  // namespace

int main() {
    for (const std::string& level : available_levels()) {
        for (const WeightCase& c : kWeights) test_linear(level, c);
        for (bool layer : {false, true}) {
            test_norm(level, Act::F32, 32, layer);
            test_norm(level, Act::BF16, 32, layer);
            test_norm(level, Act::I8, 16, layer);
            test_norm(level, Act::I8, 32, layer);
        }
        for (int kv = 0; kv < kKvTypes; ++kv)
            for (int window : {0, 100}) test_attention(level, (KvType)kv, window);
        test_sampling(level);
        std::printf("%s: checked\n", level.c_str());
    }
    return failures ? EXIT_FAILURE : EXIT_SUCCESS;
}
