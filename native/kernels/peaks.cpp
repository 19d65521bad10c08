// Loops that measure what this core can do at this instruction-set level: multiply-adds per type and read bandwidth.
#include "kernels.h"

namespace octavo::OCTAVO_ISA {

double peak_work(PeakKind kind, int64_t iterations) {
    constexpr int kChains = 12;
    vf f[kChains];
    vi n[kChains];
    for (int i = 0; i < kChains; ++i) f[i] = splat((float)i), n[i] = splat((int32_t)i);
    const vf half = splat(0.5f);
    const vu bytes = splat((uint32_t)0x01010101u);
    for (int64_t it = 0; it < iterations; ++it) {
#pragma GCC unroll 12
        for (int i = 0; i < kChains; ++i) {
            if (kind == PeakKind::F32) f[i] = fma(f[i], half, half);
            else if (kind == PeakKind::BF16) f[i] = dot2_bf16(f[i], bytes, bytes);
            else n[i] = dot4_nibble(n[i], bytes, bytes);
        }
        // Keeps the chains in registers and the loop in place.
#if defined(__x86_64__)
        for (int i = 0; i < kChains; ++i) asm volatile("" : "+x"(f[i]), "+x"(n[i]));
#else
        for (int i = 0; i < kChains; ++i) asm volatile("" : "+w"(f[i]), "+w"(n[i]));
#endif
    }
    const double per_lane = kind == PeakKind::F32 ? 2 : kind == PeakKind::BF16 ? 4 : 8;
    return per_lane * L * kChains * (double)iterations;
}

double read_bandwidth_work(const uint8_t* data, int64_t bytes) {
    vi s0 = {}, s1 = {}, s2 = {}, s3 = {};
    for (int64_t i = 0; i + 4 * VB <= bytes; i += 4 * VB) {
        s0 ^= load<vi>(data + i);
        s1 ^= load<vi>(data + i + VB);
        s2 ^= load<vi>(data + i + 2 * VB);
        s3 ^= load<vi>(data + i + 3 * VB);
    }
    s0 ^= s1 ^ s2 ^ s3;
    return (double)s0[0];
}

}  // namespace octavo::OCTAVO_ISA
