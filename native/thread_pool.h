// A persistent pool that runs a list of operations, each split into tiles that workers claim one by one.
// An operation ends when its tiles are done, not when all threads arrive: a descheduled worker delays one tile at the most.
#pragma once
#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace octavo {

// What the pool runs: `tiles(op)` is read once before the run; `run_tile` is called for each tile by any worker.
class Job {
  public:
    virtual ~Job() = default;
    virtual int operations() const = 0;
    virtual int64_t tiles(int op) const = 0;
    virtual void run_tile(int op, int64_t tile, int worker) noexcept = 0;
    // Called by worker 0 when it has seen an operation end (profiling).
    virtual void operation_done(int op) noexcept = 0;
};

class ThreadPool {
  public:
    // `threads` workers, the caller of run() among them.
    ThreadPool(int threads, int max_operations);
    ~ThreadPool();
    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

    int threads() const { return (int)workers_.size() + 1; }
    // Runs all operations in order; returns when the last tile is done. One caller at a time.
    void run(Job& job);

    // Tiles of one operation fit 24 bits; 40 bits of epoch outlast decades of steps.
    static constexpr int kTileBits = 24;

  private:
    struct alignas(64) Progress {
        std::atomic<uint64_t> next{0};  // epoch << kTileBits | next tile
        std::atomic<uint64_t> tiles{0};  // epoch << kTileBits | tiles of the operation
        alignas(64) std::atomic<uint64_t> done{0};  // epoch << kTileBits | tiles done
    };
    void worker_loop(int worker);
    void walk(uint64_t epoch, int worker);
    void wait_done(Progress& progress, uint64_t full);

    std::vector<Progress> progress_;
    std::vector<std::thread> workers_;
    std::atomic<Job*> job_{nullptr};
    std::atomic<int> operations_{0};
    std::atomic<uint64_t> epoch_{0};
    std::atomic<bool> stop_{false};
    std::atomic<int> sleepers_{0};
};

}  // namespace octavo
