// Loops that measure what this core can do at this instruction-set level: multiply-adds per type and read bandwidth.
#include "kernels.h"

namespace octavo::OCTAVO_ISA {

namespace {

#if defined(__AVX512F__)
#define OCTAVO_KEEP(v) asm volatile("" : "+v"(v))
#elif defined(__x86_64__)
#define OCTAVO_KEEP(v) asm volatile("" : "+x"(v))
#else
#define OCTAVO_KEEP(v) asm volatile("" : "+w"(v))
#endif

// Independent chains, enough to hide the latency of a multiply-add; the empty asm keeps them in registers and the loop in place.
template <class V, class Step>
double run_chains(int64_t iterations, double per_lane, vu& operand, Step&& step) {
    constexpr int kChains = 12;
    V chains[kChains] = {};
    for (int64_t it = 0; it < iterations; ++it) {
#pragma GCC unroll 12
        for (int i = 0; i < kChains; ++i) {
            chains[i] = step(chains[i]);
            OCTAVO_KEEP(chains[i]);
        }
        OCTAVO_KEEP(operand);  // else products of constants would be computed once

    }
    return per_lane * L * kChains * (double)iterations;
}

}  // namespace

double peak_work(PeakKind kind, int64_t iterations) {
    vu bytes = splat((uint32_t)0x01010101u);
    switch (kind) {
        case PeakKind::F32: return run_chains<vf>(iterations, 2, bytes, [&](vf c) { return fma(c, (vf)bytes, c); });
        case PeakKind::BF16: return run_chains<vf>(iterations, 4, bytes, [&](vf c) { return dot2_bf16(c, bytes, bytes); });
        case PeakKind::I8: return run_chains<vi>(iterations, 8, bytes, [&](vi c) { return dot4_nibble(c, bytes, bytes); });
    }
    return 0;
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
