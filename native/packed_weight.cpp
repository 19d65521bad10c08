// Packing of weights into panels.
#include "packed_weight.h"

#include <cstring>
#include <stdexcept>
#include <string>

#include "half.h"

namespace octavo {

namespace {

int64_t panel_bytes(Form form, int64_t k_padded) {
    const int64_t per_row = form == Form::F32 ? 1 : form == Form::BF16 ? 2 : form == Form::W8 || is_float8(form) ? 4 : 8;
    return k_padded / per_row * kPanelRowBytes;
}

// Elements along a side and in all; sizes in bytes then fit far inside 64 bits.
constexpr int64_t kLargestSide = int64_t{1} << 30, kLargest = int64_t{1} << 40;

struct Layout {
    int64_t columns, k_padded, group, groups, data, scales, minimums;
};

Layout layout(Form form, int64_t columns, int64_t k, int64_t group, bool minimum, bool scale_f16) {
    if (columns < 1 || k < 1) throw std::invalid_argument("a weight needs at least one column and one k");
    if (columns > kLargestSide || k > kLargestSide || columns * k > kLargest)
        throw std::invalid_argument("a weight of " + std::to_string(columns) + " x " + std::to_string(k) + " is too large");
    Layout l{};
    l.columns = round_up(columns, kColumnTile);
    l.k_padded = round_up(k, kKPad);
    l.data = l.columns / kPanel * panel_bytes(form, l.k_padded);
    if (is_table(form) && minimum) throw std::invalid_argument("codes of a table have no minimums");
    if (form == Form::W8 || form == Form::W4 || is_table(form)) {
        l.group = group == 0 ? l.k_padded : group;
        if (group < 0 || group > kLargestSide || (group != 16 && group % 32 != 0))
            throw std::invalid_argument("weight group " + std::to_string(group) + " is not 16 or a multiple of 32");
        l.groups = ceil_div(l.k_padded, l.group);
        l.scales = l.columns * l.groups * (scale_f16 ? 2 : 4);
        l.minimums = minimum ? l.scales : 0;
    }
    return l;
}

}  // namespace

size_t PackedWeight::bytes_needed(Form form, int64_t columns, int64_t k, int64_t group, bool minimum, bool scale_f16) {
    const Layout l = layout(form, columns, k, group, minimum, scale_f16);
    return (size_t)(round_up(l.data, 64) + round_up(l.scales, 64) + round_up(l.minimums, 64));
}

PackedWeight::PackedWeight(std::shared_ptr<Region> region, Form form, int64_t columns, int64_t k, int64_t group, int zero,
                           bool minimum, bool scale_f16, int rotation, const float* table)
    : region_(std::move(region)), real_columns_(columns) {
    const Layout l = layout(form, columns, k, group, minimum, scale_f16);
    if (zero < 0 || zero > 255) throw std::invalid_argument("zero point " + std::to_string(zero) + " is not in 0..255");
    if (rotation != 0 && rotation != 32 && rotation != 64)
        throw std::invalid_argument("rotation " + std::to_string(rotation) + " is not 0, 32 or 64");
    if (rotation != 0 && k % rotation != 0)
        throw std::invalid_argument("a rotated weight has a k of whole blocks of " + std::to_string(rotation));
    if (is_lut4(form) != (table != nullptr)) throw std::invalid_argument("a table goes with 4-bit codes of one, and with nothing else");
    if (is_table(form) && rotation != 0) throw std::invalid_argument("codes of a table are not rotated");
    for (int i = 0; table && i < 16; ++i) {
        const float v = table[i];
        if (!(v - v == 0.0f)) throw std::invalid_argument("a table holds numbers that are finite");
        if (form == Form::Lut4 && !(v >= -127.0f && v <= 127.0f && v == (float)(int)v))
            throw std::invalid_argument("the table holds " + std::to_string(v) + ", which is no integer from -127 to 127");
        view_.table[i] = v;
        if (form == Form::Lut4) view_.table_bytes[i] = (uint8_t)((int)v + 128);
    }
    bytes_ = (size_t)(l.data + l.scales + l.minimums);
    data_ = region_->take((size_t)l.data);
    if (l.scales) scales_ = region_->take((size_t)l.scales);
    if (l.minimums) minimums_ = region_->take((size_t)l.minimums);
    view_.form = form;
    view_.columns = l.columns;
    view_.k = k;
    view_.k_padded = l.k_padded;
    view_.data = data_;
    view_.panel_bytes = panel_bytes(form, l.k_padded);
    view_.group = (int)l.group;
    view_.groups = l.groups;
    view_.zero = zero;
    view_.rotation = rotation;
    view_.scale_f16 = scale_f16;
    view_.scales = scales_;
    view_.minimums = minimums_;
}

void PackedWeight::check(const int32_t* target, int64_t rows) const {
    for (int64_t r = 0; r < rows; ++r)
        if (target[r] < 0 || target[r] >= view_.columns)
            throw std::out_of_range("packed column " + std::to_string(target[r]) + " is outside 0.." + std::to_string(view_.columns - 1));
}

void PackedWeight::pack_f32(const int32_t* target, int64_t rows, const float* values) {
    check(target, rows);
    if (view_.form != Form::F32 && view_.form != Form::BF16) throw std::invalid_argument("pack_f32 fills f32 and bf16 weights");
    for (int64_t r = 0; r < rows; ++r) {
        uint8_t* to = at(target[r]);
        const float* from = values + r * view_.k;
        if (view_.form == Form::F32)
            for (int64_t k = 0; k < view_.k; ++k) std::memcpy(to + k * kPanelRowBytes, from + k, 4);
        else
            for (int64_t k = 0; k < view_.k; ++k) {
                const uint16_t b = bf16_from_float(from[k]);
                std::memcpy(to + k / 2 * kPanelRowBytes + k % 2 * 2, &b, 2);
            }
    }
}

void PackedWeight::pack_bf16(const int32_t* target, int64_t rows, const uint16_t* values) {
    check(target, rows);
    if (view_.form != Form::BF16) throw std::invalid_argument("pack_bf16 fills bf16 weights");
    for (int64_t r = 0; r < rows; ++r) {
        uint8_t* to = at(target[r]);
        const uint16_t* from = values + r * view_.k;
        int64_t k = 0;
        for (; k + 2 <= view_.k; k += 2) std::memcpy(to + k / 2 * kPanelRowBytes, from + k, 4);
        if (k < view_.k) std::memcpy(to + k / 2 * kPanelRowBytes, from + k, 2);
    }
}

namespace {

// A scale that is f32, or the bits of an f16, in either form.
void put_scale(uint8_t* array, int64_t index, float scale, bool f16) {
    if (f16)
        ((uint16_t*)array)[index] = f16_from_float(scale);
    else
        ((float*)array)[index] = scale;
}
void put_scale(uint8_t* array, int64_t index, uint16_t scale, bool f16) {
    if (f16)
        ((uint16_t*)array)[index] = scale;
    else
        ((float*)array)[index] = float_from_f16(scale);
}

// 4-bit codes of one column: the low nibbles of four bytes hold k to k + 3, the high ones k + 4 to k + 7.
void put_nibbles(uint8_t* to, const uint8_t* from, int64_t count) {
    int64_t k = 0;
    for (; k + 8 <= count; k += 8) {
        uint32_t low, high;
        std::memcpy(&low, from + k, 4);
        std::memcpy(&high, from + k + 4, 4);
        const uint32_t both = (low & 0x0f0f0f0fu) | (high & 0x0f0f0f0fu) << 4;
        std::memcpy(to + k / 8 * kPanelRowBytes, &both, 4);
    }
    for (; k < count; ++k) {
        uint8_t& byte = to[k / 8 * kPanelRowBytes + k % 4];
        byte = (uint8_t)(k % 8 < 4 ? (byte & 0xf0) | (from[k] & 15) : (byte & 0x0f) | (from[k] << 4));
    }
}

}  // namespace

template <class Scale>
void PackedWeight::pack_affine(const int32_t* target, int64_t rows, const uint8_t* codes, const Scale* scales, const Scale* minimums) {
    check(target, rows);
    if (view_.form != Form::W8 && view_.form != Form::W4) throw std::invalid_argument("pack_affine fills w8 and w4 weights");
    if ((minimums != nullptr) != (minimums_ != nullptr)) throw std::invalid_argument("minimums must be given exactly when the weight has them");
    const int64_t source_groups = ceil_div(view_.k, view_.group);
    for (int64_t r = 0; r < rows; ++r) {
        uint8_t* to = at(target[r]);
        const uint8_t* from = codes + r * view_.k;
        if (view_.form == Form::W8) {
            int64_t k = 0;
            for (; k + 4 <= view_.k; k += 4) std::memcpy(to + k / 4 * kPanelRowBytes, from + k, 4);
            for (; k < view_.k; ++k) to[k / 4 * kPanelRowBytes + k % 4] = from[k];
        } else {
            put_nibbles(to, from, view_.k);
        }
        const int64_t base = target[r] / kPanel * view_.groups * kPanel + target[r] % kPanel;
        for (int64_t g = 0; g < source_groups; ++g) {
            const int64_t index = base + g * kPanel;
            put_scale(scales_, index, scales[r * source_groups + g], view_.scale_f16);
            if (minimums) put_scale(minimums_, index, minimums[r * source_groups + g], view_.scale_f16);
        }
    }
}

void PackedWeight::pack_codes(const int32_t* target, int64_t rows, const uint8_t* codes, const float* scales) {
    check(target, rows);
    if (!is_table(view_.form)) throw std::invalid_argument("pack_codes fills weights whose codes are those of a table");
    const int64_t source_groups = ceil_div(view_.k, view_.group);
    for (int64_t r = 0; r < rows; ++r) {
        const uint8_t* from = codes + r * view_.k;
        if (is_lut4(view_.form)) {
            put_nibbles(at(target[r]), from, view_.k);
        } else {
            uint8_t* to = data_ + target[r] / kPanel * view_.panel_bytes + target[r] % kPanel;
            for (int64_t k = 0; k < view_.k; ++k) to[k * kPanel] = from[k];
        }
        const int64_t base = target[r] / kPanel * view_.groups * kPanel + target[r] % kPanel;
        for (int64_t g = 0; g < source_groups; ++g) put_scale(scales_, base + g * kPanel, scales[r * source_groups + g], view_.scale_f16);
    }
}

template void PackedWeight::pack_affine(const int32_t*, int64_t, const uint8_t*, const float*, const float*);
template void PackedWeight::pack_affine(const int32_t*, int64_t, const uint8_t*, const uint16_t*, const uint16_t*);

void PackedWeight::column(int64_t index, float* out) const {
    if (index < 0 || index >= view_.columns) throw std::out_of_range("no packed column " + std::to_string(index));
    const uint8_t* from = at(index);
    auto value = [&](const uint8_t* array, int64_t group) {
        const int64_t i = index / kPanel * view_.groups * kPanel + group * kPanel + index % kPanel;
        return view_.scale_f16 ? float_from_f16(((const uint16_t*)array)[i]) : ((const float*)array)[i];
    };
    for (int64_t k = 0; k < view_.k; ++k) {
        if (view_.form == Form::F32) {
            std::memcpy(out + k, from + k * kPanelRowBytes, 4);
        } else if (view_.form == Form::BF16) {
            uint16_t b;
            std::memcpy(&b, from + k / 2 * kPanelRowBytes + k % 2 * 2, 2);
            out[k] = float_from_bf16(b);
        } else {
            int code;
            const int64_t g = k / view_.group;
            if (is_float8(view_.form)) {
                code = (data_ + index / kPanel * view_.panel_bytes + index % kPanel)[k * kPanel];
                out[k] = value(scales_, g) * float_from_f8(view_.form == Form::E5M2, (uint8_t)code);
                continue;
            }
            if (view_.form == Form::W8) {
                code = from[k / 4 * kPanelRowBytes + k % 4];
            } else {
                const uint8_t both = from[k / 8 * kPanelRowBytes + k % 4];
                code = k % 8 < 4 ? both & 15 : both >> 4;
            }
            if (is_lut4(view_.form)) {
                out[k] = value(scales_, g) * view_.table[code];
                continue;
            }
            out[k] = value(scales_, g) * (float)(code - view_.zero) + (minimums_ ? value(minimums_, g) : 0.0f);
        }
    }
}

}  // namespace octavo
