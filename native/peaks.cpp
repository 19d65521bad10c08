// Measures machine peaks with the kernels of one instruction-set level.
#include "peaks.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>
#include <vector>

#include "kernel_table.h"
#include "memory.h"

namespace octavo {

namespace {

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// Best total rate of `work` (which returns its amount) run by all threads at once, in five rounds.
template <class Work>
double best_rate(int threads, Work&& work) {
    double best = 0;
    for (int round = 0; round < 5; ++round) {
        std::vector<double> amounts((size_t)threads);
        std::vector<std::thread> others;
        const double start = now();
        for (int t = 1; t < threads; ++t) others.emplace_back([&, t] { amounts[(size_t)t] = work(t); });
        amounts[0] = work(0);
        for (auto& t : others) t.join();
        const double elapsed = now() - start;
        double total = 0;
        for (double a : amounts) total += a;
        best = std::max(best, total / elapsed);
    }
    return best;
}

}  // namespace

MachinePeaks measure_machine(const std::string& level, int threads, double seconds) {
    const KernelTable& k = kernel_table(level);
    MachinePeaks peaks;
    auto compute = [&](PeakKind kind) {
        const double start = now();
        k.peak_work(kind, 100000);
        const double unit = std::max(1e-7, (now() - start) / 100000);
        const int64_t iterations = (int64_t)std::max(1000.0, seconds / 5 / unit);
        return best_rate(threads, [&](int) { return k.peak_work(kind, iterations); }) / 1e9;
    };
    peaks.f32 = compute(PeakKind::F32);
    peaks.bf16 = compute(PeakKind::BF16);
    peaks.int8 = compute(PeakKind::I8);
    auto bandwidth = [&](int64_t bytes_each, int repeats) {
        Region region((size_t)(bytes_each * threads));
        std::memset(region.data(), 1, region.size());
        volatile double sink = 0;
        return best_rate(threads, [&](int t) {
                   double sum = 0;
                   for (int r = 0; r < repeats; ++r) sum += k.read_bandwidth_work(region.data() + t * bytes_each, bytes_each);
                   sink = sum;
                   return (double)bytes_each * repeats;
               }) / 1e9;
    };
    peaks.l2 = bandwidth(256 << 10, (int)std::max(50.0, seconds * 40000));
    peaks.l3 = bandwidth(6 << 20, (int)std::max(4.0, seconds * 800));
    peaks.dram = bandwidth(int64_t{256} << 20, 1);
    return peaks;
}

}  // namespace octavo
