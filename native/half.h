// Scalar conversions between f32, f16 and bf16 (round to nearest even), for loading and packing.
#pragma once
#include <cstdint>
#include <cstring>

namespace octavo {

inline uint32_t float_bits(float x) {
    uint32_t u;
    std::memcpy(&u, &x, 4);
    return u;
}
inline float bits_float(uint32_t u) {
    float x;
    std::memcpy(&x, &u, 4);
    return x;
}
inline uint16_t bf16_from_float(float x) {
    const uint32_t u = float_bits(x);
    if (x != x) return (uint16_t)((u >> 16) | 0x40u);
    return (uint16_t)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}
inline float float_from_bf16(uint16_t b) { return bits_float((uint32_t)b << 16); }

inline float float_from_f16(uint16_t h) {
    const uint32_t sign = (uint32_t)(h & 0x8000u) << 16, magnitude = h & 0x7fffu;
    if ((magnitude & 0x7c00u) == 0x7c00u) return bits_float(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
    return bits_float(sign | float_bits(bits_float(magnitude << 13) * 0x1p112f));
}

// An 8-bit float, e5m2 or e4m3 without infinities, both by way of f16: e5m2 is its upper byte, e4m3 has the exponent 8 lower.
inline float float_from_f8(bool e5m2, uint8_t b) {
    if (e5m2) return float_from_f16((uint16_t)(b << 8));
    if ((b & 0x7f) == 0x7f) return bits_float(0x7fc00000u | (uint32_t)(b & 0x80) << 24);
    return float_from_f16((uint16_t)((b & 0x80) << 8 | (b & 0x7f) << 7)) * 256.0f;
}

inline uint16_t f16_from_float(float x) {
    const uint32_t u = float_bits(x);
    const uint32_t sign = (u >> 16) & 0x8000u, magnitude = u & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return (uint16_t)(sign | 0x7e00u);
    if (magnitude >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u);  // rounds to infinity
    if (magnitude < 0x38800000u)  // subnormal: adding 0.5 puts the rounded value into the low bits
        return (uint16_t)(sign | (float_bits(bits_float(magnitude) + 0.5f) - 0x3f000000u));
    return (uint16_t)(sign | ((magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13));
}

}  // namespace octavo
