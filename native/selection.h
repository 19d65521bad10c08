// Finding the largest logits of a row and the place where a share of its mass is reached. Rows are worked on in blocks of 64,
// whose maxima (or sums) say which blocks need not be looked at.
#pragma once
#include <algorithm>
#include <bit>
#include <cstdint>
#include <functional>
#include <limits>

#include "kernel_table.h"

namespace octavo {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

inline int64_t block_count(int64_t n) { return (n + kSampleBlock - 1) / kSampleBlock; }

// Ascending keys are descending logits, ties by ascending id. Adding 0 makes -0 equal to 0.
inline uint64_t order_key(float logit, int64_t id) {
    uint32_t bits = std::bit_cast<uint32_t>(logit + 0.0f);
    uint32_t descending = bits & 0x80000000u ? bits : ~bits & 0x7fffffffu;
    return (uint64_t)descending << 32 | (uint32_t)id;
}
inline int64_t key_id(uint64_t key) { return (int64_t)(key & 0xffffffffu); }

// A floor that at least k logits reach: the k-th largest block maximum, or for larger k a bin edge of a histogram.
inline float floor_of(const float* x, int64_t n, int64_t k, const float* block_max, float* maxima, uint32_t* histogram) {
    int64_t blocks = block_count(n);
    if (k <= blocks) {
        std::copy(block_max, block_max + blocks, maxima);
        std::nth_element(maxima, maxima + (k - 1), maxima + blocks, std::greater<float>());
        return maxima[k - 1];
    }
    constexpr int kShift = 20;
    std::fill(histogram, histogram + 4096, 0u);
    for (int64_t i = 0; i < n; ++i) ++histogram[order_key(x[i], 0) >> 32 >> kShift];
    int64_t seen = 0;
    uint32_t bin = 0;
    while ((seen += histogram[bin]) < k) ++bin;
    // The smallest logit whose key falls in this bin.
    uint32_t last = (bin << kShift) | ((1u << kShift) - 1);
    float edge = std::bit_cast<float>(last & 0x80000000u ? last : ~last & 0x7fffffffu);
    return edge == edge ? edge : -kInfinity;
}

// Keys of all logits that reach `floor`, in order of id; returns how many.
inline int64_t gather(const float* x, int64_t n, float floor, const float* block_max, uint64_t* keys) {
    int64_t count = 0;
    for (int64_t b = 0, blocks = block_count(n); b < blocks; ++b) {
        if (!(block_max[b] >= floor)) continue;
        for (int64_t i = b * kSampleBlock, end = std::min(n, i + kSampleBlock); i < end; ++i) {
            keys[count] = order_key(x[i], i);
            count += x[i] >= floor;
        }
    }
    return count;
}

// An element of a weighted selection: its key in the high half, its mass (float bits) in the low half.
inline uint64_t weighted(uint32_t key, float mass) { return (uint64_t)key << 32 | std::bit_cast<uint32_t>(mass); }
inline float mass_of(uint64_t item) { return std::bit_cast<float>((uint32_t)item); }

struct Crossing {
    uint32_t key = 0;       // the key at which the mass of all smaller or equal keys reaches the target
    double before = 0.0;    // the mass of all smaller keys
    int64_t ties = 0;       // elements with this very key
    bool found = false;
};

// Finds the crossing by three histograms over ever lower bits of the key: `visit(f)` calls f(key, mass) for every element.
template <typename Visit>
Crossing find_crossing(double target, double* bins, uint64_t* items, const Visit& visit) {
    constexpr int kBins = 2048;
    Crossing result;
    auto cross = [&](int bin_count) {
        for (int bin = 0; bin < bin_count; ++bin) {
            if (bins[bin] > 0.0 && result.before + bins[bin] >= target) return bin;
            result.before += bins[bin];
        }
        return -1;
    };
    std::fill(bins, bins + kBins, 0.0);
    visit([&](uint32_t key, float mass) { bins[key >> 20] += mass; });
    int high = cross(kBins);
    if (high < 0) return result;
    int64_t count = 0;
    visit([&](uint32_t key, float mass) {
        items[count] = weighted(key, mass);
        count += (int)(key >> 20) == high;
    });
    int shift = 10;
    for (; shift >= 0; shift -= 10) {
        std::fill(bins, bins + 1024, 0.0);
        for (int64_t i = 0; i < count; ++i) bins[items[i] >> (32 + shift) & 1023] += mass_of(items[i]);
        int bin = cross(1024);
        // The sums of a bin and of its parts may differ in the last bits: the crossing is then at the last part.
        if (bin < 0) {
            for (bin = 1023; bin > 0 && bins[bin] == 0.0;) --bin;
            result.before -= bins[bin];
        }
        int64_t kept = 0;
        for (int64_t i = 0; i < count; ++i) {
            uint64_t item = items[i];
            items[kept] = item;
            kept += (int)(item >> (32 + shift) & 1023) == bin;
        }
        count = kept;
    }
    result.key = (uint32_t)(items[0] >> 32);
    result.ties = count;
    result.found = true;
    return result;
}

}  // namespace octavo
