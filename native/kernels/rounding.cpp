// Rounding of a row of weights to groups of small integers while a model is loaded: operation by operation what
// src/octavo/quantization/rows.py does, and so the same bits.
#include "kernels.h"

namespace octavo::OCTAVO_ISA {
namespace {

constexpr float kLargestF16 = 65504.0f;
constexpr int32_t kLargestF16Bits = 0x477fe000;
constexpr float kRoundNearest = 12582912.0f;  // 1.5 * 2^23: added to a code it leaves the nearest integer in the low bits
constexpr float kSteps8 = 127.0f, kSteps4 = 15.0f;
constexpr int kFits = 2;
constexpr float kReaches[] = {1.05f, 0.93f, 0.86f, 0.78f};
constexpr int kFirstSamples = 3;
constexpr float kOnGrid = 0.1f;

// The values as they come back from being stored as f16, to nearest even.
OCTAVO_INLINE vf as_f16(vf x) {
    const vu u = (vu)x, sign = u & 0x80000000u, magnitude = u & 0x7fffffffu;
    const vu normal = (magnitude + 0xfffu + ((magnitude >> 13) & 1u)) & ~0x1fffu;
    const vf subnormal = ((vf)magnitude + splat(0.5f)) - splat(0.5f);  // whose steps are those of numbers near 1/2
    const vi small = (vi)(magnitude < 0x38800000u), infinite = (vi)(magnitude >= 0x477ff000u);
    const vu kept = ((vu)small & (vu)subnormal) | (~(vu)small & normal);
    return (vf)(sign | ((vu)infinite & 0x7f800000u) | (~(vu)infinite & kept));
}

// 1 / scale, and 0 for a scale of 0 (a group without spread).
OCTAVO_INLINE vf inverse(vf scale) { return select((vi)(scale > vf{}), splat(1.0f) / scale, vf{}); }

// The nearest integer of what lies in 0..2^22.
OCTAVO_INLINE vf nearest(vf x) { return (x + splat(kRoundNearest)) - splat(kRoundNearest); }

// Weights, or what is made of them, of up to L groups: each is one lane.
using Lanes = vf[kMaxRoundedGroup];

OCTAVO_INLINE void affine_codes(const Lanes& weights, int group, vf scale, vf minimum, Lanes& codes) {
    const vf factor = inverse(scale);
    for (int i = 0; i < group; ++i)
        codes[i] = nearest(vmin(vmax((weights[i] - minimum) * factor, vf{}), splat(kSteps4)));
}

OCTAVO_INLINE vf squared_errors(const Lanes& weights, const Lanes& codes, int group, vf scale, vf minimum) {
    vf sum = {};
    for (int i = 0; i < group; ++i) {
        const vf distance = (codes[i] * scale + minimum) - weights[i];
        sum += distance * distance;
    }
    return sum;
}

// Whether positions (0 to 1), every `stride`th of them, are near multiples of 1 / steps.
OCTAVO_INLINE vi on_grid(const Lanes& positions, int group, int stride, float steps) {
    vf furthest = {};
    for (int i = 0; i < group; i += stride) {
        const vf scaled = positions[i] * splat(steps);
        furthest = vmax(vabs(scaled - nearest(scaled)), furthest);
    }
    return (vi)(furthest < splat(kOnGrid));
}

// The scale and minimum that bring the codes nearest to the weights (least squares), where there are any.
OCTAVO_INLINE void fit(const Lanes& weights, const Lanes& codes, int group, vf& scale, vf& minimum) {
    vf mean_code = {}, mean_weight = {};
    for (int i = 0; i < group; ++i) {
        mean_code += codes[i];
        mean_weight += weights[i];
    }
    const vf size = splat((float)group);
    mean_code = mean_code / size;
    mean_weight = mean_weight / size;
    vf covariance = {}, variance = {};
    for (int i = 0; i < group; ++i) {
        const vf around = codes[i] - mean_code;
        covariance += around * (weights[i] - mean_weight);
        variance += around * around;
    }
    const vi usable = (vi)(variance > splat(0.01f)) & (vi)(covariance > vf{});
    const vf better = as_f16(covariance / variance);
    scale = select(usable, better, scale);
    minimum = select(usable, as_f16(mean_weight - better * mean_code), minimum);
}

// The groups of a row from `first` on, one in a lane; the last one again in lanes that are left.
bool round_lanes(const float* row, int64_t first, int groups, int group, uint8_t* codes, float* scales, float* minimums) {
    Lanes weights, plain, positions, found;
    for (int i = 0; i < group; ++i) {
        float lanes[L];
        for (int lane = 0; lane < L; ++lane) lanes[lane] = row[(first + (lane < groups ? lane : groups - 1)) * group + i];
        weights[i] = load<vf>(lanes);
    }
    vf lowest = splat(kLargestF16), highest = splat(-kLargestF16);
    vi within = ~vi{};
    for (int i = 0; i < group; ++i) {
        within &= (vi)(vabs(weights[i]) <= splat(kLargestF16 / 2));  // not so for a NaN
        lowest = vmin(weights[i], lowest);
        highest = vmax(weights[i], highest);
    }
    if (any_lane(~within)) return false;
    const vf spread = highest - lowest;
    const vf plain_minimum = as_f16(lowest), plain_scale = as_f16(spread / splat(kSteps4));
    affine_codes(weights, group, plain_scale, plain_minimum, plain);
    const vf plain_errors = squared_errors(weights, plain, group, plain_scale, plain_minimum);

    // A grid of 7 steps or fewer is also one of some multiple of them, 8 to 14.
    const vf factor = inverse(spread);
    for (int i = 0; i < group; ++i) positions[i] = (weights[i] - lowest) * factor;
    vf steps = {};
    const int stride = group / kFirstSamples > 1 ? group / kFirstSamples : 1;
    for (int count = (int)kSteps4 / 2 + 1; count < (int)kSteps4; ++count)
        if (any_lane(on_grid(positions, group, stride, (float)count)))
            steps = select(on_grid(positions, group, 1, (float)count), splat((float)count), steps);
    const vi coarse = (vi)(steps > vf{});
    affine_codes(weights, group, select(coarse, spread / steps, plain_scale), select(coarse, lowest, plain_minimum), found);

    // What fits from the codes in `found` bring nearer is kept, the codes in `plain`.
    vf best_scale = plain_scale, best_minimum = plain_minimum, best_errors = plain_errors;
    auto improve = [&] {
        vf scale = plain_scale, minimum = plain_minimum;
        for (int fitted = 0; fitted < kFits; ++fitted) {
            fit(weights, found, group, scale, minimum);
            affine_codes(weights, group, scale, minimum, found);
        }
        const vf errors = squared_errors(weights, found, group, scale, minimum);
        const vi better = (vi)(errors < best_errors);
        if (!any_lane(better)) return;
        best_scale = select(better, scale, best_scale);
        best_minimum = select(better, minimum, best_minimum);
        best_errors = select(better, errors, best_errors);
        for (int i = 0; i < group; ++i) plain[i] = select(better, found[i], plain[i]);
    };
    improve();
    for (const float reach : kReaches) {
        const vf lowered = lowest + spread * splat((1.0f - reach) * 0.5f);
        affine_codes(weights, group, spread * splat(reach / kSteps4), lowered, found);
        improve();
    }
    for (int i = 0; i < group; ++i)
        for (int lane = 0; lane < groups; ++lane) codes[(first + lane) * group + i] = (uint8_t)plain[i][lane];
    for (int lane = 0; lane < groups; ++lane) {
        scales[first + lane] = best_scale[lane];
        minimums[first + lane] = best_minimum[lane];
    }
    return true;
}

}  // namespace

bool round_symmetric(const float* row, int64_t k, int group, int rotation, uint8_t* codes, float* scales) {
    alignas(64) float rotated[kMaxRoundedGroup];
    for (int64_t at = 0; at < k; at += group) {
        const float* from = row + at;
        if (rotation != 0) {
            rotate_blocks(from, rotated, group, rotation);
            from = rotated;
        }
        vi bits = {};  // of magnitudes, which are ordered as these are, NaN above all
        for (int c = 0; c < group; c += L) bits = vmax((vi)vabs(load<vf>(from + c)), bits);
        const vi largest = splat(fold_lanes(bits, [](vi a, vi b) { return vmax(a, b); }));
        if (largest[0] > kLargestF16Bits) return false;
        const vf scale = as_f16((vf)largest / splat(kSteps8)), factor = inverse(scale);
        for (int c = 0; c < group; c += L) {
            // The f16 scale may be a little below the ideal one, which puts the largest weight past the last code.
            const vf code = vmin(vmax(load<vf>(from + c) * factor, splat(-kSteps8)), splat(kSteps8));
            store_low_bytes(codes + at + c, (vu)(code + splat(kRoundNearest)) + 128u);
        }
        scales[at / group] = scale[0];
    }
    return true;
}

bool round_affine(const float* row, int64_t k, int group, uint8_t* codes, float* scales, float* minimums) {
    const int64_t groups = k / group;
    for (int64_t g = 0; g < groups; g += L)
        if (!round_lanes(row, g, (int)(groups - g < L ? groups - g : L), group, codes, scales, minimums)) return false;
    return true;
}

}  // namespace octavo::OCTAVO_ISA
