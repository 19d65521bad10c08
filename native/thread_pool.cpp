// Tile claiming, completion and idle waiting of the thread pool.
#include "thread_pool.h"

#include <sched.h>

#include <chrono>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace octavo {

namespace {

inline void pause() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

constexpr int kSpins = 2000;  // tens of microseconds: longer than the gap between two operations
// Between steps a worker yields this long before it sleeps: Python plans the next step in less, an idle server soon costs nothing.
constexpr auto kLinger = std::chrono::microseconds(300);

}  // namespace

ThreadPool::ThreadPool(int threads, int max_operations) : progress_((size_t)max_operations) {
    for (int w = 1; w < threads; ++w) workers_.emplace_back([this, w] { worker_loop(w); });
}

ThreadPool::~ThreadPool() {
    stop_ = true;
    epoch_.fetch_add(1);
    epoch_.notify_all();
    for (auto& t : workers_) t.join();
}

void ThreadPool::run(Job& job) {
    // A worker that is still inside an earlier run holds an older epoch and can claim nothing of this one: claims are
    // compare-and-swap on a word that carries the epoch.
    const uint64_t epoch = epoch_.load(std::memory_order_relaxed) + 1;
    const int operations = job.operations();
    if (operations == 0) return;
    job_.store(&job, std::memory_order_relaxed);
    operations_.store(operations, std::memory_order_relaxed);
    for (int op = 0; op < operations; ++op) {
        Progress& p = progress_[(size_t)op];
        p.tiles.store(epoch << kTileBits | (uint64_t)job.tiles(op), std::memory_order_relaxed);
        p.done.store(epoch << kTileBits, std::memory_order_relaxed);
        p.next.store(epoch << kTileBits, std::memory_order_release);
    }
    epoch_.store(epoch, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) > 0) epoch_.notify_all();
    walk(epoch, 0);
}

void ThreadPool::wait_done(Progress& p, uint64_t full) {
    for (int spin = 0; p.done.load(std::memory_order_acquire) < full; ++spin) {
        if (spin < kSpins) pause();
        else sched_yield();
    }
}

void ThreadPool::walk(uint64_t epoch, int worker) {
    constexpr uint64_t kTileMask = (uint64_t{1} << kTileBits) - 1;
    Job* job = nullptr;
    int operations = 1;
    for (int op = 0; op < operations; ++op) {
        Progress& p = progress_[(size_t)op];
        uint64_t claim = p.next.load(std::memory_order_acquire);
        if (claim >> kTileBits != epoch) return;  // the run is over: all its tiles were done by others
        if (op == 0) {
            job = job_.load(std::memory_order_relaxed);
            operations = operations_.load(std::memory_order_relaxed);
        }
        // The count carries the epoch too: an old claim beside a new count would look like a tile still to be done.
        const uint64_t counted = p.tiles.load(std::memory_order_relaxed), tiles = counted & kTileMask;
        if (counted >> kTileBits != epoch) return;
        for (;;) {
            if (claim >> kTileBits != epoch) return;
            if ((claim & kTileMask) >= tiles) break;
            if (!p.next.compare_exchange_weak(claim, claim + 1, std::memory_order_acq_rel, std::memory_order_acquire)) continue;
            job->run_tile(op, (int64_t)(claim & kTileMask), worker);
            p.done.fetch_add(1, std::memory_order_acq_rel);
            claim = p.next.load(std::memory_order_acquire);
        }
        wait_done(p, (epoch << kTileBits) + tiles);
        if (worker == 0) job->operation_done(op);
    }
}

void ThreadPool::worker_loop(int worker) {
    uint64_t seen = 0;
    for (;;) {
        uint64_t epoch = epoch_.load(std::memory_order_acquire);
        if (epoch == seen) {
            const auto since = std::chrono::steady_clock::now();
            for (int spin = 0; (epoch = epoch_.load(std::memory_order_acquire)) == seen; ++spin) {
                if (spin < kSpins) {
                    pause();
                } else if (std::chrono::steady_clock::now() - since < kLinger) {
                    sched_yield();
                } else {
                    sleepers_.fetch_add(1, std::memory_order_seq_cst);
                    epoch_.wait(seen, std::memory_order_seq_cst);
                    sleepers_.fetch_sub(1, std::memory_order_seq_cst);
                }
            }
        }
        if (stop_) return;
        seen = epoch;
        walk(epoch, worker);
    }
}

}  // namespace octavo
