// Keys and values in the types that are not what is multiplied: appending a token's to the panels of its block, and widening panels.
// f16 has the panels of f32, half the size. A unit of 8 bits holds four numbers of k in the order 0, 2, 1, 3: its even bytes, then
// its odd ones, are a unit of bf16. Heads of 4 bits are rotated (queries and what comes out of attention too), which makes their
// numbers about normally distributed, and rounded to the 16 levels that are best for such (Max 1960, "Quantizing for minimum
// distortion"). A unit of theirs holds 8 numbers of k of a key, halves of bytes 0, 4, 1, 5, ..., and 4 tokens of two panels of values.
#pragma once
#include "simd.h"

namespace octavo::OCTAVO_ISA {

constexpr float kLargestBf16 = 3.3895313892515355e38f, kLargestF16 = 65504.0f, kLargestE4M3 = 448.0f, kLargestE5M2 = 57344.0f;

// Codes of a format with a sign, kExponent and kMantissa bits: nearest even, the largest finite number for all beyond it. x is finite.
template <int kExponent, int kMantissa>
OCTAVO_INLINE vu float_codes(vf x, float largest) {
    constexpr int kBias = (1 << (kExponent - 1)) - 1, kDrop = 23 - kMantissa;
    constexpr uint32_t kSmallestNormal = (uint32_t)(128 - kBias) << 23;
    constexpr uint32_t kMagic = (uint32_t)(127 + 23 - (kBias - 1 + kMantissa)) << 23;  // added, it leaves multiples of the least number
    const vf magnitude = vmin(vabs(x), splat(largest));
    const vu bits = (vu)magnitude;
    const vu normal = ((bits + ((1u << (kDrop - 1)) - 1u) + ((bits >> kDrop) & 1u)) >> kDrop) - ((uint32_t)(127 - kBias) << kMantissa);
    const vu tiny = (vu)(magnitude + (vf)splat(kMagic)) - kMagic;
    const vi is_tiny = (vi)((vi)bits < (int32_t)kSmallestNormal);
    return ((vu)is_tiny & tiny) | (~(vu)is_tiny & normal) | (((vu)x >> (31 - kExponent - kMantissa)) & (1u << (kExponent + kMantissa)));
}

// The positive levels of 4 bits, in units of the root of the mean square and each a bf16; code 8 + i is the negative of code i.
constexpr float kLevels[8] = {0.1279296875f, 0.388671875f, 0.65625f, 0.94140625f, 1.2578125f, 1.6171875f, 2.0625f, 2.734375f};

// The head times a Hadamard matrix of norm 1, in blocks of the largest power of two that divides its size: its own inverse.
inline void rotate_head(float* x, int dim) {
    const int block = dim & -dim;
    const vf norm = splat(1.0f / __builtin_sqrtf((float)block));
    vi lane;
    for (int i = 0; i < L; ++i) lane[i] = i;
    for (int c = 0; c < dim; c += L) {
        vf v = load<vf>(x + c) * norm;
        for (int h = 1; h < L; h *= 2) v = fma(v, to_float(1 - (((lane & h) != 0) & 2)), swap_lanes(v, h));
        store(x + c, v);
    }
    for (int h = L; h < block; h *= 2)
        for (int c = 0; c < dim; c += L)
            if (!(c & h)) {
                const vf a = load<vf>(x + c), b = load<vf>(x + c + h);
                store(x + c, a + b);
                store(x + c + h, a - b);
            }
}

// Codes of 4 bits, one a byte, and the bf16 scale that leaves the least error.
inline uint16_t level_codes(const float* x, int dim, uint8_t* codes) {
    vf squares = {};
    for (int c = 0; c < dim; c += L) squares = fma(load<vf>(x + c), load<vf>(x + c), squares);
    const float size = __builtin_sqrtf(sum_lanes(squares) / (float)dim);
    if (!(size > 1e-18f && size < 1e18f)) {  // the squares have left f32: what is so small is nothing, what is so large is lost to others
        vf largest = {};
        for (int c = 0; c < dim; c += L) largest = vmax(vabs(load<vf>(x + c)), largest);
        const float most = max_lanes(largest);
        for (int c = 0; c < dim; ++c) codes[c] = (uint8_t)((x[c] < 0.0f ? 8 : 0) + (__builtin_fabsf(x[c]) > 0.5f * most ? 7 : 0));
        return most > 1e-18f ? bf16_bits(most / kLevels[7]) : (uint16_t)0;
    }
    const vf inverse = splat(1.0f / size);
    vf product = {}, weight = {};
    for (int c = 0; c < dim; c += L) {
        const vf value = load<vf>(x + c), y = vabs(value) * inverse;
        vf level = splat(kLevels[0]);
        vu code = (vu)value >> 31 << 3;
        for (int i = 1; i < 8; ++i) {
            const vi above = (vi)(y > splat(0.5f * (kLevels[i - 1] + kLevels[i])));
            level = select(above, splat(kLevels[i]), level);
            code -= (vu)above;
        }
        product = fma(y, level, product);
        weight = fma(level, level, weight);
        store_low_bytes(codes + c, code);
    }
    return bf16_bits(size * (sum_lanes(product) / sum_lanes(weight)));
}

template <KvType kv>
OCTAVO_INLINE vu kv_codes(vf x) {
    if constexpr (kv == KvType::F16) return float_codes<5, 10>(x, kLargestF16);
    else if constexpr (kv == KvType::E5M2) return float_codes<5, 2>(x, kLargestE5M2);
    else if constexpr (kv == KvType::I8) return (vu)(x + splat(12582912.0f));  // 1.5 * 2^23: the low byte is the nearest integer
    else return float_codes<4, 3>(x, kLargestE4M3);
}

// The least bf16 scale at which the largest magnitude has a code; 0 where all are next to nothing.
OCTAVO_INLINE uint16_t kv_scale_bits(float largest, float largest_code) {
    if (!(largest > 1e-30f)) return 0;
    const float scale = largest / largest_code;
    uint32_t bits;
    __builtin_memcpy(&bits, &scale, 4);
    return (uint16_t)((bits + 0xffffu) >> 16);
}

// The byte of a token in a unit of four tokens.
OCTAVO_INLINE int place_of(int t) { return t % 4 == 1 ? 2 : t % 4 == 2 ? 1 : t % 4; }

// What a token, number t of its block, has in a panel: codes of x * factor or, where the type is scaled, of x / *scale, which is set.
template <KvType kv>
OCTAVO_INLINE void append_codes(uint8_t* panel, bool keys, int t, int dim, const float* x, float factor, uint16_t* scale) {
    if constexpr (kv_scaled(kv) && kv != KvType::I4) {
        vf largest = {};
        for (int c = 0; c < dim; c += L) largest = vmax(vabs(load<vf>(x + c)), largest);
        *scale = kv_scale_bits(max_lanes(largest), kv == KvType::I8 ? 127.0f : kLargestE4M3);
        factor = *scale ? 1.0f / bf16_value(*scale) : 0.0f;
    }
    if constexpr (kv == KvType::F16) {
        typedef uint16_t vh __attribute__((vector_size(VB / 2)));
        alignas(64) uint16_t codes[kMaxHeadDim];
        for (int c = 0; c < dim; c += L) store(codes + c, __builtin_convertvector(kv_codes<kv>(load<vf>(x + c)), vh));
        uint16_t* to = (uint16_t*)panel;
        if (keys)
            for (int c = 0; c < dim; ++c) to[c * kBlock + t] = codes[c];
        else
            for (int c = 0; c < dim; c += kPanel) __builtin_memcpy(to + c * kBlock + t * kPanel, codes + c, kPanel * 2);
    } else if constexpr (kv == KvType::I4) {
        alignas(64) uint8_t codes[kMaxHeadDim];
        *scale = level_codes(x, dim, codes);
        if (keys) {
            for (int c = 0; c < dim; c += 8) {
                uint32_t unit = 0;
                for (int i = 0; i < 8; ++i) unit |= (uint32_t)codes[c + i] << (i / 2 * 4 + i % 2 * 16);
                __builtin_memcpy(panel + c / 8 * kPanelRowBytes + t * 4, &unit, 4);
            }
        } else {
            uint8_t* to = panel + t / 4 * kPanelRowBytes + place_of(t);
            for (int c = 0; c < dim; c += 2 * kPanel, to += kBlock / 4 * kPanelRowBytes)
                for (int i = 0; i < kPanel; ++i) to[i * 4] = (uint8_t)(codes[c + i] | codes[c + kPanel + i] << 4);
        }
    } else {
        alignas(64) uint8_t codes[kMaxHeadDim];
        for (int c = 0; c < dim; c += L) store_low_bytes(codes + c, kv_codes<kv>(load<vf>(x + c) * splat(factor)));
        if (keys) {
            for (int c = 0; c < dim; c += 4) {
                const uint32_t unit = load_u32(codes + c);
                const uint32_t placed = (unit & 0xff0000ffu) | (unit & 0xff00u) << 8 | (unit >> 8 & 0xff00u);
                __builtin_memcpy(panel + c * kBlock + t * 4, &placed, 4);
            }
        } else {
            uint8_t* to = panel + t / 4 * kPanelRowBytes + place_of(t);
            for (int c = 0; c < dim; ++c) to[c / kPanel * (kPanel * kBlock) + c % kPanel * 4] = codes[c];
        }
    }
}

inline void append_codes(KvType kv, uint8_t* panel, bool keys, int t, int dim, const float* x, float factor, uint16_t* scale) {
    switch (kv) {
        case KvType::F16: return append_codes<KvType::F16>(panel, keys, t, dim, x, factor, scale);
        case KvType::E4M3: return append_codes<KvType::E4M3>(panel, keys, t, dim, x, factor, scale);
        case KvType::E5M2: return append_codes<KvType::E5M2>(panel, keys, t, dim, x, factor, scale);
        case KvType::E4M3Scaled: return append_codes<KvType::E4M3Scaled>(panel, keys, t, dim, x, factor, scale);
        case KvType::I8: return append_codes<KvType::I8>(panel, keys, t, dim, x, factor, scale);
        case KvType::I4: return append_codes<KvType::I4>(panel, keys, t, dim, x, factor, scale);
        case KvType::F32:
        case KvType::BF16: break;  // stored as they are multiplied
    }
}

// The fp8 codes in the low byte of each half of a lane, as bf16.
template <int kMantissa>
OCTAVO_INLINE vu bf16_of_fp8(vu codes) {
    constexpr int kBias = kMantissa == 3 ? 7 : 15;
#if defined(__AVX512BW__)
    // A number below the smallest normal one is looked up: as bf16 it would stay below, and be taken for 0.
    alignas(64) static constexpr uint16_t kTiny[32] = {0,
                                                       kMantissa == 3 ? 0x3b00 : 0x3780,
                                                       kMantissa == 3 ? 0x3b80 : 0x3800,
                                                       kMantissa == 3 ? 0x3bc0 : 0x3840,
                                                       0x3c00, 0x3c20, 0x3c40, 0x3c60};
    const vu normal = ((codes & 0x007f007fu) << (7 - kMantissa)) + (uint32_t)(127 - kBias) * 0x00800080u;
    const __mmask32 tiny = _mm512_testn_epi16_mask((__m512i)codes, _mm512_set1_epi16((short)(0x7f & (-1 << kMantissa))));
    const vu magnitude = (vu)_mm512_mask_permutexvar_epi16((__m512i)normal, tiny, (__m512i)codes, _mm512_load_si512(kTiny));
    return magnitude | ((codes << 8) & 0x80008000u);
#else
    // In f32, where exponent 0 taken for that of a normal number is put right: 2 * (1.m - 1) * 2^-bias.
    auto value = [](vu code) {
        const vu bits = (code & 0x7fu) << (23 - kMantissa);
        const vf normal = (vf)(bits + ((uint32_t)(127 - kBias) << 23));
        const vf one = (vf)splat((uint32_t)(127 - kBias) << 23);
        const vf magnitude = select((vi)((vi)bits < (1 << 23)), (normal - one) * splat(2.0f), normal);
        return (vu)magnitude | (code & 0x80u) << 24;
    };
    return value(codes & 0xffffu) >> 16 | (value(codes >> 16) & 0xffff0000u);
#endif
}

// The level of the lowest four bits of each half of a lane, as bf16.
OCTAVO_INLINE vu bf16_of_level(vu codes) {
#if defined(__AVX512BW__)
    alignas(64) static constexpr uint16_t kBits[32] = {  // twice, as five bits of an index count
        0x3e03, 0x3ec7, 0x3f28, 0x3f71, 0x3fa1, 0x3fcf, 0x4004, 0x402f, 0xbe03, 0xbec7, 0xbf28, 0xbf71, 0xbfa1, 0xbfcf, 0xc004, 0xc02f,
        0x3e03, 0x3ec7, 0x3f28, 0x3f71, 0x3fa1, 0x3fcf, 0x4004, 0x402f, 0xbe03, 0xbec7, 0xbf28, 0xbf71, 0xbfa1, 0xbfcf, 0xc004, 0xc02f};
    return (vu)_mm512_permutexvar_epi16((__m512i)codes, _mm512_load_si512(kBits));
#elif defined(__AVX2__)
    // The low and the high bytes.
    alignas(16) static constexpr uint8_t kLow[16] = {0x03, 0xc7, 0x28, 0x71, 0xa1, 0xcf, 0x04, 0x2f, 0x03, 0xc7, 0x28, 0x71, 0xa1, 0xcf, 0x04, 0x2f};
    alignas(16) static constexpr uint8_t kHigh[16] = {0x3e, 0x3e, 0x3f, 0x3f, 0x3f, 0x3f, 0x40, 0x40, 0xbe, 0xbe, 0xbf, 0xbf, 0xbf, 0xbf, 0xc0, 0xc0};
    const __m256i low = _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i*)kLow));
    const __m256i high = _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i*)kHigh));
    const __m256i index = (__m256i)((codes & 0x000f000fu) * 0x0101u);
    return ((vu)_mm256_shuffle_epi8(low, index) & 0x00ff00ffu) | ((vu)_mm256_shuffle_epi8(high, index) & 0xff00ff00u);
#else
    static constexpr uint32_t kBits[16] = {0x3e03, 0x3ec7, 0x3f28, 0x3f71, 0x3fa1, 0x3fcf, 0x4004, 0x402f,
                                           0xbe03, 0xbec7, 0xbf28, 0xbf71, 0xbfa1, 0xbfcf, 0xc004, 0xc02f};
    vu found;
    for (int i = 0; i < L; ++i) found[i] = kBits[codes[i] & 15u] | kBits[codes[i] >> 16 & 15u] << 16;
    return found;
#endif
}

// A row of a panel (64 bytes) as the two rows it becomes.
template <KvType kv>
OCTAVO_INLINE void widen_row(const uint8_t* from, uint8_t* to) {
    if constexpr (kv == KvType::F16) {
        for (int v = 0; v < 2 * PV; ++v) store(to + v * VB, load_f16(from + v * (VB / 2)));
    } else {
        for (int v = 0; v < PV; ++v) {
            const vu x = load<vu>(from + v * VB);
            vu even, odd;
            if constexpr (kv == KvType::I8) {
                auto bf16 = [](vi low, vi high) { return (vu)to_float(low >> 24) >> 16 | ((vu)to_float(high >> 24) & 0xffff0000u); };
                even = bf16((vi)(x << 24), (vi)(x << 8));
                odd = bf16((vi)(x << 16), (vi)x);
            } else {
                constexpr int kMantissa = kv == KvType::E5M2 ? 2 : 3;
                even = bf16_of_fp8<kMantissa>(x & 0x00ff00ffu);
                odd = bf16_of_fp8<kMantissa>((x >> 8) & 0x00ff00ffu);
            }
            store(to + v * VB, even);
            store(to + kPanelRowBytes + v * VB, odd);
        }
    }
}

// Panels of 4 bits: a row of keys becomes four rows, one of values two rows of each of two panels.
inline void widen_levels(bool keys, const uint8_t* const* from, const uint8_t* const* next, int panels, int64_t rows, uint8_t* to) {
    constexpr int64_t kPanelBytes = kBlock / 2 * kPanelRowBytes;  // of the values of 16 dimensions
    for (int p = 0; p < panels; ++p, to += rows * 4 * kPanelRowBytes)
        for (int64_t r = 0; r < rows; ++r) {
            __builtin_prefetch(next[p] + r * kPanelRowBytes, 0, 2);
            uint8_t* row = keys ? to + r * 4 * kPanelRowBytes : to + r / 4 * 2 * kPanelBytes + r % 4 * 2 * kPanelRowBytes;
            const int64_t second = keys ? kPanelRowBytes : kPanelBytes, third = keys ? 2 * kPanelRowBytes : kPanelRowBytes;
            for (int v = 0; v < PV; ++v) {
                const vu x = load<vu>(from[p] + r * kPanelRowBytes + v * VB);
                store(row + v * VB, bf16_of_level(x));
                store(row + second + v * VB, bf16_of_level(x >> 4));
                store(row + third + v * VB, bf16_of_level(x >> 8));
                store(row + second + third + v * VB, bf16_of_level(x >> 12));
            }
        }
}

// Panels widened, while the lines at the same places of others are asked for.
template <KvType kv>
inline void widen_panels(const uint8_t* const* from, const uint8_t* const* next, int panels, int64_t rows, uint8_t* to) {
    for (int p = 0; p < panels; ++p)
        for (int64_t r = 0; r < rows; ++r, to += 2 * kPanelRowBytes) {
            __builtin_prefetch(next[p] + r * kPanelRowBytes, 0, 2);
            widen_row<kv>(from[p] + r * kPanelRowBytes, to);
        }
}

inline void widen_panels(KvType kv, bool keys, const uint8_t* const* from, const uint8_t* const* next, int panels, int64_t rows, uint8_t* to) {
    switch (kv) {
        case KvType::F16: return widen_panels<KvType::F16>(from, next, panels, rows, to);
        case KvType::E5M2: return widen_panels<KvType::E5M2>(from, next, panels, rows, to);
        case KvType::I8: return widen_panels<KvType::I8>(from, next, panels, rows, to);
        case KvType::I4: return widen_levels(keys, from, next, panels, rows, to);
        case KvType::E4M3:
        case KvType::E4M3Scaled: return widen_panels<KvType::E4M3>(from, next, panels, rows, to);
        case KvType::F32:
        case KvType::BF16: break;
    }
}

}  // namespace octavo::OCTAVO_ISA
