// The checksum of built models: as fast as memory is read.
#include "checksum.h"

#include <cstring>

namespace octavo {

namespace {

constexpr int kLanes = 8;
constexpr uint64_t kFactor = 0x9e3779b97f4a7c15u;  // 2^64 over the golden ratio, which is odd

inline uint64_t step(uint64_t lane, uint64_t word) {
    const uint64_t product = (lane ^ word) * kFactor;
    return product << 29 | product >> 35;
}

}  // namespace

uint64_t checksum64(const uint8_t* data, size_t bytes) {
    uint64_t lanes[kLanes];
    for (int i = 0; i < kLanes; ++i) lanes[i] = kFactor * (uint64_t)(i + 1);
    size_t position = 0;
    for (; position + 8 * kLanes <= bytes; position += 8 * kLanes)
        for (int i = 0; i < kLanes; ++i) {
            uint64_t word;
            std::memcpy(&word, data + position + 8 * i, 8);
            lanes[i] = step(lanes[i], word);
        }
    for (int i = 0; position < bytes; ++i) {
        uint64_t word = 0;
        const size_t left = bytes - position < 8 ? bytes - position : 8;
        std::memcpy(&word, data + position, left);
        lanes[i] = step(lanes[i], word);
        position += left;
    }
    uint64_t sum = (uint64_t)bytes;
    for (uint64_t lane : lanes) sum = step(sum, lane);
    return sum ^ sum >> 32;
}

}  // namespace octavo
