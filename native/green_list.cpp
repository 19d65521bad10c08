// mt19937 (Matsumoto and Nishimura 1998) and the first steps of a Fisher-Yates shuffle drawn from it.
#include "green_list.h"

#include <algorithm>
#include <numeric>

namespace octavo {

GreenList::GreenList(int64_t vocab) : vocab_(vocab), order_(std::make_unique_for_overwrite<int32_t[]>(vocab)) {}

void GreenList::seed(uint32_t seed) noexcept {
    state_[0] = seed;
    for (uint32_t i = 1; i < kState; ++i) state_[i] = 1812433253u * (state_[i - 1] ^ (state_[i - 1] >> 30)) + i;
}

void GreenList::refill() noexcept {
    constexpr int kAhead = 397;
    auto twist = [](uint32_t high, uint32_t low) {
        uint32_t y = (high & 0x80000000u) | (low & 0x7fffffffu);
        return (y >> 1) ^ (-(y & 1u) & 0x9908b0dfu);
    };
    uint32_t* s = state_;
    for (int i = 0; i < kState - kAhead; ++i) s[i] = s[i + kAhead] ^ twist(s[i], s[i + 1]);
    for (int i = kState - kAhead; i < kState - 1; ++i) s[i] = s[i + kAhead - kState] ^ twist(s[i], s[i + 1]);
    s[kState - 1] = s[kAhead - 1] ^ twist(s[kState - 1], s[0]);
    for (int i = 0; i < kState; ++i) {
        uint32_t y = s[i];
        y ^= y >> 11;
        y ^= (y << 7) & 0x9d2c5680u;
        y ^= (y << 15) & 0xefc60000u;
        numbers_[i] = y ^ (y >> 18);
    }
}

const int32_t* GreenList::select(int64_t previous, int64_t count) noexcept {
    // torch keeps the low 32 bits of a generator's seed.
    seed((uint32_t)(15485863ull * (uint64_t)previous));
    int32_t* order = order_.get();
    std::iota(order, order + vocab_, 0);
    // What is at a place does not change once the shuffle has passed it, so a beginning takes no more steps than it is long.
    int64_t steps = std::min(count, vocab_ - 1);
    for (int64_t begin = 0; begin < steps; begin += kState) {
        refill();
        for (int64_t i = begin, end = std::min<int64_t>(begin + kState, steps); i < end; ++i)
            std::swap(order[i], order[i + numbers_[i - begin] % (uint32_t)(vocab_ - i)]);
    }
    return order;
}

}  // namespace octavo
