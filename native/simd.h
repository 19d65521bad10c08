// The vector type of the instruction set a file is compiled for, and the few primitives whose code depends on it.
// Everything else is written once over these types. Included only by native/kernels/*.cpp.
#pragma once
#include <cstdint>
#include <cstring>

#include "common.h"
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#ifndef OCTAVO_ISA
#error "OCTAVO_ISA names the namespace of this instruction-set level"
#endif
#define OCTAVO_INLINE inline __attribute__((always_inline))

namespace octavo::OCTAVO_ISA {

#if defined(__AVX512F__)
constexpr int VB = 64;
#elif defined(__AVX2__)
constexpr int VB = 32;
#else
constexpr int VB = 16;
#endif
constexpr int L = VB / 4;         // 32-bit lanes of a vector
constexpr int PV = kPanelRowBytes / VB;  // vectors of a panel row

typedef float vf __attribute__((vector_size(VB)));
typedef int32_t vi __attribute__((vector_size(VB)));
typedef uint32_t vu __attribute__((vector_size(VB)));

template <class V>
OCTAVO_INLINE V load(const void* p) {
    V v;
    __builtin_memcpy(&v, p, sizeof(V));
    return v;
}
template <class V>
OCTAVO_INLINE void store(void* p, V v) {
    __builtin_memcpy(p, &v, sizeof(V));
}
OCTAVO_INLINE vf splat(float x) { return x - vf{}; }
OCTAVO_INLINE vi splat(int32_t x) { return x - vi{}; }
OCTAVO_INLINE vu splat(uint32_t x) { return x - vu{}; }
OCTAVO_INLINE uint32_t load_u32(const void* p) {
    uint32_t x;
    __builtin_memcpy(&x, p, 4);
    return x;
}
OCTAVO_INLINE vf to_float(vi x) { return __builtin_convertvector(x, vf); }
OCTAVO_INLINE vf select(vi mask, vf a, vf b) { return mask ? a : b; }
// a > b ? a : b, lane by lane (so b where either is NaN), which is what x86 calls max.
OCTAVO_INLINE vf vmax(vf a, vf b) {
#if defined(__AVX512F__)
    return (vf)_mm512_maskz_max_ps((__mmask16)-1, (__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#elif defined(__SSE2__)
    return (vf)_mm_max_ps((__m128)a, (__m128)b);
#else
    return a > b ? a : b;
#endif
}
OCTAVO_INLINE vi vmax(vi a, vi b) { return a > b ? a : b; }
OCTAVO_INLINE vf vmin(vf a, vf b) {
#if defined(__AVX512F__)
    return (vf)_mm512_maskz_min_ps((__mmask16)-1, (__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (vf)_mm256_min_ps((__m256)a, (__m256)b);
#elif defined(__SSE2__)
    return (vf)_mm_min_ps((__m128)a, (__m128)b);
#else
    return a < b ? a : b;
#endif
}
OCTAVO_INLINE vf vabs(vf a) { return (vf)((vi)a & 0x7fffffff); }

// a * b + c with one rounding where the instruction set has it.
OCTAVO_INLINE vf fma(vf a, vf b, vf c) {
#if defined(__AVX512F__)
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

// Lane i gets the value of lane i ^ distance.
template <class V>
OCTAVO_INLINE V swap_lanes(V v, int distance) {
#if defined(__clang__)  // shuffles by constants only, which this becomes one of when the distance is known
    V swapped = v;
    for (int i = 0; i < L; ++i) swapped[i] = v[i ^ distance];
    return swapped;
#else
    vi lane;
    for (int i = 0; i < L; ++i) lane[i] = i;
    return __builtin_shuffle(v, lane ^ distance);
#endif
}

// All lanes folded into one by halves, so the order depends on the vector width alone.
template <class V, class Fold>
OCTAVO_INLINE auto fold_lanes(V v, Fold&& fold) {
    for (int w = L / 2; w > 0; w /= 2) v = fold(v, swap_lanes(v, w));
    return v[0];
}
// All lanes of each of L vectors folded into one: lane i of the result is that of vector i.
template <int Distance = 1, class Fold>
OCTAVO_INLINE vi fold_each(vi (&v)[L], Fold&& fold) {
    if constexpr (Distance == L) {
        return v[0];
    } else {
        vi lane;
        for (int i = 0; i < L; ++i) lane[i] = i;
        const vi upper = (vi)((lane & Distance) != 0);
#pragma GCC unroll 8
        for (int i = 0; i < L; i += 2 * Distance) {
            const vi kept = upper ? v[i + Distance] : v[i], crossing = upper ? v[i] : v[i + Distance];
            v[i] = fold(kept, swap_lanes(crossing, Distance));
        }
        return fold_each<2 * Distance>(v, fold);
    }
}
OCTAVO_INLINE float sum_lanes(vf v) { return fold_lanes(v, [](vf a, vf b) { return a + b; }); }
OCTAVO_INLINE float max_lanes(vf v) { return fold_lanes(v, [](vf a, vf b) { return vmax(a, b); }); }
OCTAVO_INLINE vf max_everywhere(vf v) {  // in every lane
    for (int w = L / 2; w > 0; w /= 2) v = vmax(v, swap_lanes(v, w));
    return v;
}
OCTAVO_INLINE uint32_t sum_lanes(vu v) { return fold_lanes(v, [](vu a, vu b) { return a + b; }); }
OCTAVO_INLINE bool any_lane(vi v) { return fold_lanes(v, [](vi a, vi b) { return a | b; }) != 0; }

// bf16 pairs: low half is the even k. acc += w.even * a.even + w.odd * a.odd
OCTAVO_INLINE vf bf16_even(vu x) { return (vf)(x << 16); }
OCTAVO_INLINE vf bf16_odd(vu x) { return (vf)(x & 0xffff0000u); }
OCTAVO_INLINE vf dot2_bf16(vf acc, vu w, vu a) {
#if defined(__AVX512BF16__)
#if defined(__clang__) && __clang_major__ < 19
    asm("" : "+v"(a));  // clang 16 crashes where it sees that bf16 lanes are all one number
#endif
    return (vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)w);
#else
    acc = fma(bf16_even(w), bf16_even(a), acc);
    return fma(bf16_odd(w), bf16_odd(a), acc);
#endif
}

// The same of weights that are f32 but exact in bf16, even and odd ones apart.
OCTAVO_INLINE vf dot2_floats(vf acc, vf even, vf odd, vu a) {
#if defined(__AVX512BF16__)
    return dot2_bf16(acc, ((vu)even >> 16) | ((vu)odd & 0xffff0000u), a);
#else
    acc = fma(even, bf16_even(a), acc);
    return fma(odd, bf16_odd(a), acc);
#endif
}

// Round to nearest even; a NaN stays a (quiet) NaN.
OCTAVO_INLINE vu bf16_bits(vf x) {
    vu u = (vu)x;
    vu rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    vi nan = (vi)(x != x);
    return ((vu)nan & ((u >> 16) | 0x40u)) | (~(vu)nan & rounded);
}
OCTAVO_INLINE uint16_t bf16_bits(float x) {
    uint32_t u;
    __builtin_memcpy(&u, &x, 4);
    if (x != x) return (uint16_t)((u >> 16) | 0x40u);
    return (uint16_t)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}
OCTAVO_INLINE float bf16_value(uint16_t b) {
    uint32_t u = (uint32_t)b << 16;
    float x;
    __builtin_memcpy(&x, &u, 4);
    return x;
}
OCTAVO_INLINE void store_bf16(void* p, vf x) {
#if defined(__AVX512BF16__)
    store(p, _mm512_cvtneps_pbh((__m512)x));  // numbers below the smallest normal one become 0, as every product takes them
#else
    typedef uint16_t vh __attribute__((vector_size(VB / 2)));
    store(p, __builtin_convertvector(bf16_bits(x), vh));
#endif
}
// Both rounded to bf16, side by side.
OCTAVO_INLINE vu bf16_of(vf a, vf b) {
#if defined(__AVX512BF16__)
    return (vu)_mm512_cvtne2ps_pbh((__m512)b, (__m512)a);
#else
    vu both;
    store_bf16(&both, a);
    store_bf16((uint8_t*)&both + VB / 2, b);
    return both;
#endif
}

// The lowest byte of each lane, L bytes in all. Compilers take a converted vector apart lane by lane.
OCTAVO_INLINE void store_low_bytes(void* p, vu x) {
#if defined(__AVX512F__)
    const __m128i bytes = _mm512_maskz_cvtepi32_epi8((__mmask16)-1, (__m512i)x);
    __builtin_memcpy(p, &bytes, L);
#elif defined(__AVX2__)
    const __m256i low = _mm256_shuffle_epi8((__m256i)x, _mm256_set1_epi32(0x0c080400));
    const __m128i bytes = _mm_unpacklo_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1));
    __builtin_memcpy(p, &bytes, L);
#elif defined(__SSE2__)
    const __m128i halves = _mm_packs_epi32((__m128i)(x & 0xffu), __m128i{});
    const __m128i bytes = _mm_packus_epi16(halves, halves);
    __builtin_memcpy(p, &bytes, L);
#else
    typedef uint8_t vb __attribute__((vector_size(L)));
    store(p, __builtin_convertvector(x, vb));
#endif
}

// L half-precision values to f32, exactly.
OCTAVO_INLINE vf load_f16(const void* p) {
#if defined(__AVX512F__)
    return (vf)_mm512_maskz_cvtph_ps((__mmask16)-1, _mm256_loadu_si256((const __m256i*)p));
#elif defined(__F16C__)
    return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#elif defined(__aarch64__)
    return (vf)vcvt_f32_f16(vld1_f16((const float16_t*)p));
#else
    typedef uint16_t vh __attribute__((vector_size(VB / 2)));
    vu h = __builtin_convertvector(load<vh>(p), vu);
    vu sign = (h & 0x8000u) << 16;
    // Exponent and mantissa moved to f32 position, then scaled by 2^112: right for subnormals too.
    vf magnitude = (vf)((h & 0x7fffu) << 13) * splat(0x1p112f);
    vi special = (vi)((h & 0x7c00u) == 0x7c00u);
    vu infinite = ((h & 0x03ffu) << 13) | 0x7f800000u;
    return (vf)(sign | ((vu)special & infinite) | (~(vu)special & (vu)magnitude));
#endif
}
OCTAVO_INLINE float f16_value(uint16_t h) {
    uint16_t t[L] = {h};
    return load_f16(t)[0];
}

// L 8-bit floats to f32: e5m2 as they are, e4m3 times 2^-8. Both are moved into f16, whose subnormal numbers cost nothing.
template <bool E5M2>
OCTAVO_INLINE vf load_f8(const void* p) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
    __m256i h = _mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)p)), 8);
    if (!E5M2) h = _mm256_and_si256(_mm256_srai_epi16(h, 1), _mm256_set1_epi16((short)0xbf80));
    return (vf)_mm512_maskz_cvtph_ps((__mmask16)-1, h);
#elif defined(__AVX2__) && defined(__F16C__)
    __m128i h = _mm_slli_epi16(_mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i*)p)), 8);
    if (!E5M2) h = _mm_and_si128(_mm_srai_epi16(h, 1), _mm_set1_epi16((short)0xbf80));
    return (vf)_mm256_cvtph_ps(h);
#else
    typedef uint8_t vb __attribute__((vector_size(L)));
    typedef int16_t vh __attribute__((vector_size(VB / 2)));
    vh h = __builtin_convertvector(load<vb>(p), vh) << 8;
    if (!E5M2) h = (h >> 1) & (int16_t)0xbf80;
    return load_f16(&h);
#endif
}

// Each byte of `index`, from 0 to 15, becomes that byte of a table of 16.
struct ByteTable {
#if defined(__AVX512BW__) || defined(__AVX2__) || defined(__aarch64__)
    vu entries;
    explicit OCTAVO_INLINE ByteTable(const uint8_t* table) {
        for (int i = 0; i < VB / 16; ++i) __builtin_memcpy((uint8_t*)&entries + 16 * i, table, 16);
    }
#else
    const uint8_t* entries;
    explicit OCTAVO_INLINE ByteTable(const uint8_t* table) : entries(table) {}
#endif
    OCTAVO_INLINE vu at(vu index) const {
#if defined(__AVX512BW__)
        return (vu)_mm512_shuffle_epi8((__m512i)entries, (__m512i)index);
#elif defined(__AVX2__)
        return (vu)_mm256_shuffle_epi8((__m256i)entries, (__m256i)index);
#elif defined(__aarch64__)
        return (vu)vqtbl1q_u8((uint8x16_t)entries, (uint8x16_t)index);
#else
        uint8_t bytes[VB];
        store(bytes, index);
        for (int i = 0; i < VB; ++i) bytes[i] = entries[bytes[i]];
        return load<vu>(bytes);
#endif
    }
};

// The number of a table of 16 that the low four bits of each lane say.
struct FloatTable {
#if defined(__AVX512F__)
    vf entries;
    explicit OCTAVO_INLINE FloatTable(const float* table) : entries(load<vf>(table)) {}
    OCTAVO_INLINE vf at(vu index) const { return (vf)_mm512_maskz_permutexvar_ps((__mmask16)-1, (__m512i)index, (__m512)entries); }
#elif defined(__AVX2__)
    vf low, high;
    explicit OCTAVO_INLINE FloatTable(const float* table) : low(load<vf>(table)), high(load<vf>(table + 8)) {}
    OCTAVO_INLINE vf at(vu index) const {
        const __m256 a = _mm256_permutevar8x32_ps((__m256)low, (__m256i)index), b = _mm256_permutevar8x32_ps((__m256)high, (__m256i)index);
        return (vf)_mm256_blendv_ps(a, b, (__m256)(index << 28));
    }
#elif defined(__aarch64__)
    uint8x16x4_t entries;
    explicit OCTAVO_INLINE FloatTable(const float* table) { __builtin_memcpy(&entries, table, 64); }
    OCTAVO_INLINE vf at(vu index) const {
        return (vf)vqtbl4q_u8(entries, (uint8x16_t)((index & 15u) * 0x04040404u + 0x03020100u));
    }
#else
    const float* entries;
    explicit OCTAVO_INLINE FloatTable(const float* table) : entries(table) {}
    OCTAVO_INLINE vf at(vu index) const {
        vf found;
        for (int i = 0; i < L; ++i) found[i] = entries[index[i] & 15u];
        return found;
    }
#endif
};

OCTAVO_INLINE float f8_value(bool e5m2, uint8_t b) {
    return e5m2 ? f16_value((uint16_t)(b << 8)) : f16_value((uint16_t)((b & 0x80) << 8 | (b & 0x7f) << 7)) * 256.0f;
}

// x * H / sqrt(Size), H the Hadamard matrix of a power of two in natural order, which is its own inverse: butterflies over lane
// distances inside vectors, then between them.
template <int Size>
OCTAVO_INLINE void hadamard(const float* x, float* out) {
    static_assert(Size == 32 || Size == 64);
    constexpr int N = Size / L;
    const vf norm = splat(Size == 32 ? 0.17677669529663687f : 0.125f);
    vf v[N];
    for (int i = 0; i < N; ++i) v[i] = load<vf>(x + i * L) * norm;
    vi lane;
    for (int i = 0; i < L; ++i) lane[i] = i;
    for (int h = 1; h < L; h *= 2) {
        // One multiply-add for what negates half the lanes and adds: a product with 1 or -1 is exact.
        const vf sign = to_float(1 - (((lane & h) != 0) & 2));
        for (int i = 0; i < N; ++i) v[i] = fma(v[i], sign, swap_lanes(v[i], h));
    }
    for (int h = 1; h < N; h *= 2)
        for (int i = 0; i < N; ++i)
            if (!(i & h)) {
                const vf a = v[i], b = v[i + h];
                v[i] = a + b;
                v[i + h] = a - b;
            }
    for (int i = 0; i < N; ++i) store(out + i * L, v[i]);
}
// A whole number of blocks, each rotated.
OCTAVO_INLINE void rotate_blocks(const float* x, float* out, int count, int block) {
    if (block == 64)
        for (int c = 0; c < count; c += 64) hadamard<64>(x + c, out + c);
    else
        for (int c = 0; c < count; c += 32) hadamard<32>(x + c, out + c);
}

// acc[lane] += sum of 4 products (w - kDotBias) * a, w unsigned bytes, a signed bytes in [-127, 127].
#if defined(__AVX512VNNI__)
constexpr int kDotBias = 0;
OCTAVO_INLINE vi dot4(vi acc, vu w, vu a) { return (vi)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, (__m512i)a); }
OCTAVO_INLINE vi dot4_nibble(vi acc, vu w, vu a) { return dot4(acc, w, a); }
#elif defined(__AVX2__)
constexpr int kDotBias = 128;
OCTAVO_INLINE vi dot4_nibble(vi acc, vu w, vu a) {  // w <= 15: sums of two products stay far inside int16
    __m256i pairs = _mm256_maddubs_epi16((__m256i)w, (__m256i)a);
    return acc + (vi)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
}
OCTAVO_INLINE vi dot4(vi acc, vu w, vu a) {  // |w - 128| * (a with the sign of w - 128): 2 * 128 * 127 fits int16
    __m256i s = (__m256i)(w ^ 0x80808080u);
    __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(s), _mm256_sign_epi8((__m256i)a, s));
    return acc + (vi)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
}
#elif defined(__ARM_FEATURE_DOTPROD)
constexpr int kDotBias = 128;
OCTAVO_INLINE vi dot4_nibble(vi acc, vu w, vu a) {
    return (vi)vdotq_s32((int32x4_t)acc, (int8x16_t)w, (int8x16_t)a);
}
OCTAVO_INLINE vi dot4(vi acc, vu w, vu a) { return dot4_nibble(acc, w ^ 0x80808080u, a); }
#elif defined(__SSE2__)
constexpr int kDotBias = 0;
OCTAVO_INLINE vi dot4(vi acc, vu w, vu a) {  // bytes 0,2 and 1,3 as int16 pairs
    __m128i w02 = (__m128i)(w & 0x00ff00ffu), w13 = (__m128i)((w >> 8) & 0x00ff00ffu);
    __m128i a02 = _mm_srai_epi16(_mm_slli_epi16((__m128i)a, 8), 8), a13 = _mm_srai_epi16((__m128i)a, 8);
    return acc + (vi)_mm_madd_epi16(w02, a02) + (vi)_mm_madd_epi16(w13, a13);
}
OCTAVO_INLINE vi dot4_nibble(vi acc, vu w, vu a) { return dot4(acc, w, a); }
#else
constexpr int kDotBias = 0;
OCTAVO_INLINE vi dot4(vi acc, vu w, vu a) {
    for (int b = 0; b < 4; ++b) {
        vi wb = (vi)((w >> (8 * b)) & 0xffu);
        vi ab = ((vi)(a << (24 - 8 * b))) >> 24;
        acc += wb * ab;
    }
    return acc;
}
OCTAVO_INLINE vi dot4_nibble(vi acc, vu w, vu a) { return dot4(acc, w, a); }
#endif

// e^x for x in [-87, 88], to about 1 ulp: 2^n * p(r), |r| <= ln2/2.
OCTAVO_INLINE vf vexp_bounded(vf x) {
    vf t = x * splat(1.44269504088896341f);
    vf shifted = t + splat(12582912.0f);  // round to nearest integer: 1.5 * 2^23
    vf n = shifted - splat(12582912.0f);
    vf r = fma(n, splat(-0.693359375f), x);
    r = fma(n, splat(2.12194440054690583e-4f), r);
    vf p = splat(1.9875691500e-4f);
    p = fma(p, r, splat(1.3981999507e-3f));
    p = fma(p, r, splat(8.3334519073e-3f));
    p = fma(p, r, splat(4.1665795894e-2f));
    p = fma(p, r, splat(1.6666665459e-1f));
    p = fma(p, r, splat(5.0000001201e-1f));
    vf y = fma(p, r * r, r) + splat(1.0f);
    vi exponent = ((vi)shifted - 0x4b400000 + 127) << 23;
    return y * (vf)exponent;
}

// e^x for x <= 88. Below -87 the result is 0.
OCTAVO_INLINE vf vexp(vf x) {
    vf result = vexp_bounded(vmin(vmax(x, splat(-87.0f)), splat(88.0f)));
    result = select((vi)(x < splat(-87.0f)), vf{}, result);
    return select((vi)(x != x), x, result);
}

// 2^x for x <= 126, 0 below -125, 1 at 0: n + r with |r| <= 1/2 and a polynomial of least relative error, 2^-18 where what
// follows is rounded to bf16 anyway, else 2^-23.
template <bool Exact>
OCTAVO_INLINE vf vexp2(vf x) {
    const vf shifted = x + splat(12582912.0f);  // round to nearest integer: 1.5 * 2^23
    const vf r = x - (shifted - splat(12582912.0f));
    vf p;
    if constexpr (Exact) {
        p = fma(splat(1.5353362e-4f), r, splat(1.3398875e-3f));
        p = fma(p, r, splat(9.6184369e-3f));
        p = fma(p, r, splat(5.5503324e-2f));
        p = fma(p, r, splat(2.4022648e-1f));
        p = fma(p, r, splat(6.9314718e-1f));
    } else {
        p = fma(splat(9.5828529e-3f), r, splat(5.5906426e-2f));
        p = fma(p, r, splat(2.4024099e-1f));
        p = fma(p, r, splat(6.9312418e-1f));
    }
    p = fma(p, r, splat(1.0f));
    const vf scaled = (vf)((vu)p + ((vu)shifted << 23));  // unsigned, where wrapping round is defined
    return select((vi)(x < splat(-125.0f)), vf{}, scaled);  // a NaN passes
}

// The exponential ends at 88: without the bound a number far below would come out of the division as more than nothing. A NaN
// stays one by the numerator.
OCTAVO_INLINE vf vsilu(vf x) {
    const vf y = vmax(splat(-100.0f), x);  // in this order a NaN stays one
    return y / (splat(1.0f) + vexp_bounded(vmin(vmax(-y, splat(-87.0f)), splat(88.0f))));
}

OCTAVO_INLINE vf vrelu(vf x) { return vmax(vf{}, x); }  // in this order a NaN stays one

// tanh through e^2x, exact enough where it matters (absolute error under 2e-7).
OCTAVO_INLINE vf vtanh(vf x) {
    vf c = vmin(vmax(x, splat(-15.0f)), splat(15.0f));
    vf e = vexp(c + c);
    vf y = (e - splat(1.0f)) / (e + splat(1.0f));
    return select((vi)(x != x), x, y);
}
OCTAVO_INLINE vf vgelu_tanh(vf x) {
    vf inner = splat(0.7978845608028654f) * fma(splat(0.044715f) * x * x, x, x);
    return splat(0.5f) * x * (splat(1.0f) + vtanh(inner));
}
// erf by Abramowitz and Stegun 7.1.26 (absolute error 1.5e-7).
OCTAVO_INLINE vf vgelu(vf x) {
    vf z = x * splat(0.70710678118654752f);
    vf a = vabs(z);
    vf t = splat(1.0f) / fma(splat(0.3275911f), a, splat(1.0f));
    vf p = splat(1.061405429f);
    p = fma(p, t, splat(-1.453152027f));
    p = fma(p, t, splat(1.421413741f));
    p = fma(p, t, splat(-0.284496736f));
    p = fma(p, t, splat(0.254829592f));
    vf y = splat(1.0f) - p * t * vexp(-a * a);
    vf erf = select((vi)(z < vf{}), -y, y);
    return splat(0.5f) * x * (splat(1.0f) + erf);
}

}  // namespace octavo::OCTAVO_ISA
