// A fast 64-bit checksum of memory, to find files that were damaged; no protection against forgery.
#pragma once
#include <cstddef>
#include <cstdint>

namespace octavo {

// Eight lanes take the words of 8 bytes (little-endian, the last one padded with zeros) in turn: lane = (lane ^ word) * an odd number,
// rotated. Every step can be undone, so that one changed word always changes the sum. The lanes and the length are then mixed into one.
uint64_t checksum64(const uint8_t* data, size_t bytes);

}  // namespace octavo
