// Unpacking the rows of files and packing them, piece by piece, on several threads.
#include "stored_rows.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <exception>
#include <iterator>
#include <mutex>
#include <stdexcept>
#include <thread>

#include "half.h"
#include "kernel_table.h"

namespace octavo {

namespace {

// Values a thread takes at once: enough to be worth taking, and little enough to end together with the others.
constexpr int64_t kPieceValues = int64_t{1} << 18;

struct Block {
    const char* name;
    int64_t values, bytes;
    int bits;
    int64_t group;
    int zero;
    bool minimum, f16;  // f16: scales and minimums are stored as such, one of each per block
};

constexpr Block kBlocks[] = {
    {"Q4_0", 32, 18, 4, 32, 8, false, true},    {"Q4_1", 32, 20, 4, 32, 0, true, true},
    {"Q5_0", 32, 22, 8, 32, 128, false, true},  {"Q5_1", 32, 24, 8, 32, 0, true, true},
    {"Q8_0", 32, 34, 8, 32, 128, false, true},  {"Q2_K", 256, 84, 4, 16, 0, true, false},
    {"Q3_K", 256, 110, 4, 16, 4, false, false}, {"Q4_K", 256, 144, 4, 32, 0, true, false},
    {"Q5_K", 256, 176, 8, 32, 0, true, false},  {"Q6_K", 256, 210, 8, 16, 128, false, false},
    {"BF16", 1, 2, 0, 0, 0, false, false},      {"F16", 1, 2, 0, 0, 0, false, false},
    {"F32", 1, 4, 0, 0, 0, false, false},
};

const Block& block(Stored kind) { return kBlocks[(int)kind]; }
bool dense(Stored kind) { return kind >= Stored::BF16; }

uint16_t half_at(const uint8_t* from) {
    uint16_t h;
    std::memcpy(&h, from, 2);
    return h;
}

// `bytes` bytes to the codes in their low nibbles, then those in their high ones.
void nibbles(const uint8_t* from, int bytes, uint8_t* codes) {
    for (int i = 0; i < bytes; ++i) codes[i] = from[i] & 15;
    for (int i = 0; i < bytes; ++i) codes[bytes + i] = from[i] >> 4;
}

// The codes of a block of 32; what is added to 5-bit codes shifts their zero to that of all 8-bit codes.
void codes_of_32(Stored kind, const uint8_t* from, uint8_t* codes) {
    if (kind == Stored::Q8_0) {
        for (int i = 0; i < 32; ++i) codes[i] = from[2 + i] ^ 0x80;
        return;
    }
    const bool five = kind == Stored::Q5_0 || kind == Stored::Q5_1, minimum = kind == Stored::Q4_1 || kind == Stored::Q5_1;
    const uint8_t* rest = from + (minimum ? 4 : 2);
    nibbles(rest + (five ? 4 : 0), 16, codes);
    if (!five) return;
    uint32_t bits;
    std::memcpy(&bits, rest, 4);
    const uint8_t shift = kind == Stored::Q5_0 ? 128 - 16 : 0;
    for (int i = 0; i < 32; ++i) codes[i] = (uint8_t)((codes[i] | (bits >> i & 1) << 4) + shift);
}

// The 6-bit scales and minimums of Q4_K and Q5_K: those of groups 4 to 7 keep their two top bits above those of 0 to 3.
void k_scales(const uint8_t* from, float* scales, float* minimums) {
    const float factor = float_from_f16(half_at(from)), minimum = -float_from_f16(half_at(from + 2));
    const uint8_t *first = from + 4, *second = from + 8, *third = from + 12;
    for (int i = 0; i < 4; ++i) {
        scales[i] = (float)(first[i] & 0x3f) * factor;
        scales[4 + i] = (float)((third[i] & 15) | (first[i] >> 2 & 0x30)) * factor;
        minimums[i] = (float)(second[i] & 0x3f) * minimum;
        minimums[4 + i] = (float)(third[i] >> 4 | (second[i] >> 2 & 0x30)) * minimum;
    }
}

// 256 codes of two bits: each half takes 32 bytes, the first 32 values the lowest bits.
void two_bits(const uint8_t* from, uint8_t* codes) {
    for (int half = 0; half < 2; ++half)
        for (int run = 0; run < 4; ++run)
            for (int i = 0; i < 32; ++i) codes[128 * half + 32 * run + i] = from[32 * half + i] >> 2 * run & 3;
}

void q2_k_block(const uint8_t* from, uint8_t* codes, float* scales, float* minimums) {
    two_bits(from + 16, codes);
    const float factor = float_from_f16(half_at(from + 80)), minimum = -float_from_f16(half_at(from + 82));
    for (int g = 0; g < 16; ++g) {
        scales[g] = (float)(from[g] & 15) * factor;
        minimums[g] = (float)(from[g] >> 4) * minimum;
    }
}

// Bit i of byte j of the first 32 is the third bit of value 32 i + j; scales have four bits in a nibble, two elsewhere.
void q3_k_block(const uint8_t* from, uint8_t* codes, float* scales) {
    two_bits(from + 32, codes);
    for (int run = 0; run < 8; ++run)
        for (int i = 0; i < 32; ++i) codes[32 * run + i] |= (uint8_t)((from[i] >> run & 1) << 2);
    const uint8_t *low = from + 96, *high = from + 104;
    const float factor = float_from_f16(half_at(from + 108));
    for (int g = 0; g < 16; ++g) {
        const int nibble = g < 8 ? low[g] & 15 : low[g - 8] >> 4;
        scales[g] = (float)((nibble | (high[g % 4] >> 2 * (g / 4) & 3) << 4) - 32) * factor;
    }
}

void k_block(Stored kind, const uint8_t* from, uint8_t* codes, float* scales, float* minimums) {
    if (kind == Stored::Q2_K) return q2_k_block(from, codes, scales, minimums);
    if (kind == Stored::Q3_K) return q3_k_block(from, codes, scales);
    if (kind == Stored::Q6_K) {
        for (int half = 0; half < 2; ++half) {
            const uint8_t *low = from + 64 * half, *high = from + 128 + 32 * half;
            uint8_t* to = codes + 128 * half;
            nibbles(low, 64, to);
            for (int run = 0; run < 4; ++run)
                for (int i = 0; i < 32; ++i) to[32 * run + i] = (uint8_t)((to[32 * run + i] | (high[i] >> 2 * run & 3) << 4) + 96);
        }
        const float factor = float_from_f16(half_at(from + 208));
        for (int g = 0; g < 16; ++g) scales[g] = (float)(int8_t)from[192 + g] * factor;
        return;
    }
    const uint8_t* packed = from + (kind == Stored::Q4_K ? 16 : 48);
    for (int run = 0; run < 4; ++run) nibbles(packed + 32 * run, 32, codes + 64 * run);
    if (kind == Stored::Q5_K)
        for (int run = 0; run < 8; ++run)
            for (int i = 0; i < 32; ++i) codes[32 * run + i] |= (uint8_t)((from[16 + i] >> run & 1) << 4);
    k_scales(from, scales, minimums);
}

// Room for one row in every shape it takes on the way.
struct Scratch {
    std::vector<uint8_t> codes;
    std::vector<uint16_t> scale_bits, minimum_bits, bits;
    std::vector<float> scales, minimums, values;
};

bool affine(const WeightView& w) { return w.form == Form::W8 || w.form == Form::W4; }

// Rounds the row to the groups of the weight.
void pack_rounded(const StoredRows& from, int32_t column, const KernelTable& kernels, Scratch& scratch) {
    const WeightView& w = from.weight->view();
    scratch.codes.resize((size_t)w.k);
    scratch.scales.resize((size_t)(w.k / w.group));
    scratch.minimums.resize((size_t)(w.k / w.group));
    const float* values = scratch.values.data();
    uint8_t* codes = scratch.codes.data();
    float *scales = scratch.scales.data(), *minimums = w.minimums ? scratch.minimums.data() : nullptr;
    if (minimums ? !kernels.round_affine(values, w.k, w.group, codes, scales, minimums)
                 : !kernels.round_symmetric(values, w.k, w.group, w.rotation, codes, scales))
        throw std::overflow_error("weights that are not finite or too large cannot be rounded");
    from.weight->pack_affine(&column, 1, codes, scales, minimums);
}

void pack_dense(const StoredRows& from, const uint8_t* row, int32_t column, const KernelTable& kernels, Scratch& scratch) {
    const int64_t k = from.weight->view().k;
    const Form form = from.weight->view().form;
    if (from.kind == Stored::BF16 && form == Form::BF16) {
        // Copied first: a header may leave the data at an odd address.
        scratch.bits.resize((size_t)k);
        std::memcpy(scratch.bits.data(), row, (size_t)k * 2);
        from.weight->pack_bf16(&column, 1, scratch.bits.data());
        return;
    }
    scratch.values.resize((size_t)k);
    float* values = scratch.values.data();
    if (from.kind == Stored::F32)
        std::memcpy(values, row, (size_t)k * 4);
    else if (from.kind == Stored::F16)
        for (int64_t i = 0; i < k; ++i) values[i] = float_from_f16(half_at(row + 2 * i));
    else
        for (int64_t i = 0; i < k; ++i) values[i] = float_from_bf16(half_at(row + 2 * i));
    if (affine(from.weight->view())) return pack_rounded(from, column, kernels, scratch);
    from.weight->pack_f32(&column, 1, values);
}

// Whether the weight has the group, zero point and minimums of the blocks themselves.
bool same_form(const Block& b, const WeightView& w) {
    return w.group == b.group && w.zero == b.zero && (w.minimums != nullptr) == b.minimum;
}

// Scales and minimums (if any) of one row in the form of the weight: repeated for smaller groups, the zero point folded in.
void widen(const Block& b, const WeightView& w, int64_t groups, Scratch& scratch) {
    const int64_t repeats = b.group / w.group;
    const float zero = (float)-b.zero;
    scratch.scales.resize((size_t)(groups * repeats));
    scratch.minimums.resize((size_t)(groups * repeats));
    float *scales = scratch.scales.data(), *minimums = scratch.minimums.data();
    if (w.minimums && !b.minimum)
        for (int64_t g = 0; g < groups; ++g) minimums[g] = scales[g] * zero;
    for (int64_t g = groups; repeats > 1 && g-- > 0;)
        for (int64_t r = repeats; r-- > 0;) {
            scales[g * repeats + r] = scales[g];
            minimums[g * repeats + r] = minimums[g];
        }
}

void pack_row(const StoredRows& from, const uint8_t* row, int32_t column, const KernelTable& kernels, Scratch& scratch) {
    if (dense(from.kind)) return pack_dense(from, row, column, kernels, scratch);
    const Block& b = block(from.kind);
    const WeightView& w = from.weight->view();
    const int64_t k = w.k, groups = k / b.group;
    const bool same = same_form(b, w);
    scratch.codes.resize((size_t)k);
    if (b.f16 && same) {
        scratch.scale_bits.resize((size_t)groups);
        scratch.minimum_bits.resize((size_t)groups);
        for (int64_t g = 0; g < groups; ++g) {
            const uint8_t* at = row + g * b.bytes;
            codes_of_32(from.kind, at, scratch.codes.data() + 32 * g);
            scratch.scale_bits[(size_t)g] = half_at(at);
            if (b.minimum) scratch.minimum_bits[(size_t)g] = half_at(at + 2);
        }
        from.weight->pack_affine(&column, 1, scratch.codes.data(), scratch.scale_bits.data(), b.minimum ? scratch.minimum_bits.data() : nullptr);
        return;
    }
    scratch.scales.resize((size_t)groups);
    scratch.minimums.resize((size_t)groups);
    unpack_row(from.kind, row, k, scratch.codes.data(), scratch.scales.data(), scratch.minimums.data());
    if (!same) widen(b, w, groups, scratch);
    from.weight->pack_affine(&column, 1, scratch.codes.data(), scratch.scales.data(), w.minimums ? scratch.minimums.data() : nullptr);
}

// Lets go of the pages that lie wholly inside; the file brings them back should they be read again.
void let_go(const uint8_t* begin, const uint8_t* end) {
    static const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    const uintptr_t first = ((uintptr_t)begin + page - 1) / page * page, last = (uintptr_t)end / page * page;
    if (last > first) madvise((void*)first, last - first, MADV_DONTNEED);
}

struct Piece {
    const StoredRows* from;
    int64_t begin, end;
};

void pack_piece(const Piece& piece, const KernelTable& kernels, Scratch& scratch) {
    const StoredRows& from = *piece.from;
    const int64_t bytes = stored_row_bytes(from.kind, from.weight->view().k);
    for (int64_t r = piece.begin; r < piece.end; ++r)
        pack_row(from, from.data + (from.order ? from.order[r] : r) * bytes, from.target[r], kernels, scratch);
    if (!from.mapped) return;
    int64_t first = piece.begin, last = piece.end;
    if (from.order) {
        // Rows in another order: those that lie among these may be wanted by another piece, for which the file brings them back.
        const auto [least, most] = std::minmax_element(from.order + piece.begin, from.order + piece.end);
        first = *least, last = *most + 1;
        if (last - first > 4 * (piece.end - piece.begin)) return;
    }
    let_go(from.data + first * bytes, from.data + last * bytes);
}

// What rounding makes: see src/octavo/quantization/views.py.
void check_rounded(const WeightView& w) {
    const bool eight = w.form == Form::W8;
    if (w.group % kPanel || w.group > kMaxRoundedGroup || w.k % w.group || !w.scale_f16 || (w.minimums != nullptr) == eight ||
        w.zero != (eight ? 128 : 0) || (w.rotation && (!eight || w.group % w.rotation)))
        throw std::invalid_argument("dense rows are not rounded to the groups, zero point or minimum of the weight");
}

void check(const StoredRows& from) {
    const Block& b = block(from.kind);
    const WeightView& w = from.weight->view();
    stored_row_bytes(from.kind, w.k);
    if (dense(from.kind)) {
        if (affine(w)) check_rounded(w);
    } else if (!affine(w)) {
        throw std::invalid_argument(std::string(b.name) + " is not stored in the form of the weight");
    } else if (b.group % w.group || (w.form == Form::W4 && b.bits != 4) || (b.minimum && !w.minimums) || w.zero != (w.minimums ? 0 : b.zero)) {
        throw std::invalid_argument(std::string(b.name) + " has wider codes, another group, zero point or minimum than the weight");
    }
    for (int64_t r = 0; from.order && r < from.rows; ++r)
        if (from.order[r] < 0 || from.order[r] >= from.stored) throw std::out_of_range("stored row " + std::to_string(from.order[r]) + " is outside");
}

}  // namespace

Stored stored_kind(const std::string& name) {
    for (int i = 0; i < (int)std::size(kBlocks); ++i)
        if (name == kBlocks[i].name) return (Stored)i;
    throw std::invalid_argument("rows stored as " + name + " are not known");
}

int64_t stored_row_bytes(Stored kind, int64_t k) {
    const Block& b = block(kind);
    if (k < 1 || k % b.values) throw std::invalid_argument(std::to_string(k) + " values are no whole number of " + b.name + " blocks");
    return k / b.values * b.bytes;
}

void unpack_row(Stored kind, const uint8_t* row, int64_t k, uint8_t* codes, float* scales, float* minimums) {
    const Block& b = block(kind);
    const int64_t groups = b.group ? b.values / b.group : 0;
    for (int64_t i = 0; i < k / b.values; ++i, row += b.bytes, codes += b.values, scales += groups, minimums += groups) {
        if (!b.f16) {
            k_block(kind, row, codes, scales, minimums);
            continue;
        }
        codes_of_32(kind, row, codes);
        *scales = float_from_f16(half_at(row));
        if (b.minimum) *minimums = float_from_f16(half_at(row + 2));
    }
}

void pack_stored(const std::vector<StoredRows>& all, int threads, const KernelTable& kernels) {
    std::vector<Piece> pieces;
    for (const auto& from : all) {
        check(from);
        // Whole panels, so that no two threads write to a cache line.
        const int64_t step = round_up(std::max<int64_t>(1, kPieceValues / from.weight->view().k), kPanel);
        for (int64_t r = 0; r < from.rows; r += step) pieces.push_back({&from, r, std::min(r + step, from.rows)});
    }
    std::atomic<size_t> next{0};
    std::exception_ptr failure;
    std::mutex failing;
    auto work = [&] {
        Scratch scratch;
        try {
            for (size_t i; (i = next.fetch_add(1)) < pieces.size();) pack_piece(pieces[i], kernels, scratch);
        } catch (...) {
            next = pieces.size();
            std::lock_guard lock(failing);
            failure = std::current_exception();
        }
    };
    std::vector<std::thread> helpers;
    for (int i = 1; i < std::min<int>(threads, (int)pieces.size()); ++i) helpers.emplace_back(work);
    work();
    for (auto& helper : helpers) helper.join();
    if (failure) std::rethrow_exception(failure);
    // What was left: pages that two pieces or tensors share, and those of reordered rows.
    for (const auto& from : all)
        if (from.mapped) let_go(from.data, from.data + from.stored * stored_row_bytes(from.kind, from.weight->view().k));
}

}  // namespace octavo
