// The thread that asks for pages.
#include "prefault.h"

#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>

#include <algorithm>

namespace octavo {

namespace {

constexpr size_t kPiece = size_t{2} << 20;  // a huge page
#if defined(MADV_POPULATE_WRITE)
constexpr int kPopulate = MADV_POPULATE_WRITE;
#else
constexpr int kPopulate = 23;  // MADV_POPULATE_WRITE of Linux 5.14, where the C library is older
#endif

}  // namespace

Prefault::Prefault(uint8_t* data, size_t bytes) {
    thread_ = std::thread([this, data, bytes] {
#if defined(SCHED_IDLE)
        sched_param none{};
        pthread_setschedparam(pthread_self(), SCHED_IDLE, &none);
#endif
        for (size_t at = 0; at < bytes && !stop_.load(std::memory_order_relaxed); at += kPiece)
            if (madvise(data + at, std::min(kPiece, bytes - at), kPopulate) != 0) break;
        done_.store(true, std::memory_order_release);
    });
}

Prefault::~Prefault() {
    stop_.store(true, std::memory_order_relaxed);
    thread_.join();
}

}  // namespace octavo
