// What the machine can do: peak rates per type and read bandwidth per level of memory.
#pragma once
#include <string>

namespace octavo {

struct MachinePeaks {
    double f32 = 0, bf16 = 0, int8 = 0;      // 1e9 operations a second, all threads together
    double dram = 0, l3 = 0, l2 = 0;         // 1e9 bytes a second, all threads together
};

// Each figure is the best of several runs of about `seconds` in all.
MachinePeaks measure_machine(const std::string& level, int threads, double seconds);

}  // namespace octavo
