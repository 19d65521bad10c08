// The passes of the sampler over a whole row of logits. Rows are worked on in blocks of 64; a sum is 16 lanes in one order within a
// block, and blocks are added in order in double precision. Nothing is fused, and wide vectors do what narrow ones would do one
// after another, so every level computes the same bits.
#include "kernels.h"

namespace octavo::OCTAVO_ISA {
namespace {

constexpr int kLanes = 16;
constexpr int N = kLanes / L;  // vectors that make the lanes of a sum
constexpr float kInfinity = __builtin_inff();
constexpr float kLargest = __FLT_MAX__;

OCTAVO_INLINE int64_t block_count(int64_t n) { return (n + kSampleBlock - 1) / kSampleBlock; }

// e^x for x <= 0, to about 1 ulp: 2^n * p(r) with |r| <= ln2/2; 0 below -87 (and for -infinity).
OCTAVO_INLINE vf exp_unfused(vf x) {
    const vi dead = (vi)(x < splat(-87.0f));
    const vf clamped = select(dead, splat(-87.0f), x);
    const vf shifted = clamped * splat(1.44269504088896341f) + splat(12582912.0f);  // 1.5 * 2^23: rounds to an integer
    const vf n = shifted - splat(12582912.0f);
    const vf r = (clamped - n * splat(0.693359375f)) + n * splat(2.12194440054690583e-4f);
    vf p = splat(1.9875691500e-4f);
    p = p * r + splat(1.3981999507e-3f);
    p = p * r + splat(8.3334519073e-3f);
    p = p * r + splat(4.1665795894e-2f);
    p = p * r + splat(1.6666665459e-1f);
    p = p * r + splat(5.0000001201e-1f);
    const vf y = (p * (r * r) + r) + splat(1.0f);
    const vi exponent = ((vi)shifted - 0x4b400000 + 127) << 23;
    return (vf)(~dead & (vi)(y * (vf)exponent));
}

// Lanes 4m + j (m, j = 0 .. 3) as ((m0 + m1) + (m2 + m3)) of each j, then (j0 + j2) + (j1 + j3).
OCTAVO_INLINE float sum_16(const vf (&s)[N]) {
    vf v;
    if constexpr (N == 4) {
        v = (s[0] + s[1]) + (s[2] + s[3]);
    } else if constexpr (N == 2) {
        v = (s[0] + swap_lanes(s[0], 4)) + (s[1] + swap_lanes(s[1], 4));
    } else {
        v = s[0] + swap_lanes(s[0], 4);
        v = v + swap_lanes(v, 8);
    }
    v = v + swap_lanes(v, 2);
    return v[0] + v[1];
}

// A block of a row of n, copied with `fill` behind the row's end where it is the last and not whole.
OCTAVO_INLINE const float* block_of(const float* x, int64_t n, int64_t block, float fill, float* buffer) {
    const int64_t begin = block * kSampleBlock, left = n - begin;
    if (left >= kSampleBlock) return x + begin;
    for (int64_t i = 0; i < kSampleBlock; ++i) buffer[i] = i < left ? x[begin + i] : fill;
    return buffer;
}

template <bool keep>
double exponentials(const float* x, int64_t n, float maximum, float scale, float* out, float* block_sum) {
    alignas(64) float buffer[kSampleBlock];
    double total = 0.0;
    const vf m = splat(maximum), s = splat(scale);
    for (int64_t b = 0, blocks = block_count(n); b < blocks; ++b) {
        const float* p = block_of(x, n, b, -kInfinity, buffer);
        vf sums[N] = {};
        for (int64_t i = 0; i < kSampleBlock; i += kLanes) {
            for (int v = 0; v < N; ++v) {
                const vf e = exp_unfused((load<vf>(p + i + v * L) - m) * s);
                if constexpr (keep) store(out + b * kSampleBlock + i + v * L, e);
                sums[v] += e;
            }
        }
        block_sum[b] = sum_16(sums);
        total += block_sum[b];
    }
    return total;
}

template <bool above>
double keep(float* e, const float* measure, int64_t n, float threshold, float* block_sum) {
    double total = 0.0;
    const vf t = splat(threshold);
    for (int64_t b = 0, blocks = block_count(n); b < blocks; ++b) {
        float* q = e + b * kSampleBlock;
        const float* p = measure + b * kSampleBlock;
        vf sums[N] = {};
        for (int64_t i = 0; i < kSampleBlock; i += kLanes) {
            for (int v = 0; v < N; ++v) {
                const vf by = load<vf>(p + i + v * L);
                const vi kept = above ? (vi)(by >= t) : (vi)(by <= t);
                const vf value = (vf)(kept & load<vi>(q + i + v * L));
                store(q + i + v * L, value);
                sums[v] += value;
            }
        }
        block_sum[b] = sum_16(sums);
        total += block_sum[b];
    }
    return total;
}

}  // namespace

bool sample_scan(const float* x, int64_t n, float* block_max, float* maximum) {
    alignas(64) float buffer[kSampleBlock];
    vi wrong = {};
    float row_max = -kInfinity;
    for (int64_t b = 0, blocks = block_count(n); b < blocks; ++b) {
        const float* p = block_of(x, n, b, -kInfinity, buffer);
        vf m[N];
        for (int v = 0; v < N; ++v) m[v] = splat(-kInfinity);
        for (int64_t i = 0; i < kSampleBlock; i += kLanes) {
            for (int v = 0; v < N; ++v) {
                const vf value = load<vf>(p + i + v * L);
                wrong |= ~(vi)(value <= splat(kLargest));
                m[v] = vmax(value, m[v]);
            }
        }
        for (int v = 1; v < N; ++v) m[0] = vmax(m[v], m[0]);
        block_max[b] = max_lanes(m[0]);
        row_max = block_max[b] > row_max ? block_max[b] : row_max;
    }
    *maximum = row_max;
    return !any_lane(wrong);
}

double sample_exponentials(const float* x, int64_t n, float maximum, float scale, float* out, float* block_sum) {
    return out ? exponentials<true>(x, n, maximum, scale, out, block_sum) : exponentials<false>(x, n, maximum, scale, out, block_sum);
}

double sample_keep(float* e, const float* measure, int64_t n, float threshold, bool above, float* block_sum) {
    return above ? keep<true>(e, measure, n, threshold, block_sum) : keep<false>(e, measure, n, threshold, block_sum);
}

int64_t sample_rank(const float* x, int64_t n, int64_t token, const float* block_max) {
    const float value = x[token];
    const int64_t own = token / kSampleBlock, whole = n / kSampleBlock;
    int64_t before = 0;
    for (int64_t b = 0, blocks = block_count(n); b < blocks; ++b) {
        if (!(block_max[b] >= value)) continue;
        const float* p = x + b * kSampleBlock;
        if (b == own || b == whole) {
            const int64_t left = n - b * kSampleBlock, count = left < kSampleBlock ? left : kSampleBlock;
            for (int64_t i = 0; i < count; ++i) before += p[i] > value || (p[i] == value && b * kSampleBlock + i < token);
            continue;
        }
        vi counts = {};
        for (int64_t i = 0; i < kSampleBlock; i += L) {
            const vf v = load<vf>(p + i);
            counts -= b < own ? (vi)(v >= splat(value)) : (vi)(v > splat(value));
        }
        before += sum_lanes((vu)counts);
    }
    return before + 1;
}

}  // namespace octavo::OCTAVO_ISA
