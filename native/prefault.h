// Has memory that will be written soon given pages by the system beforehand, in the background and only with processor time that
// nobody else wants.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <thread>

namespace octavo {

class Prefault {
  public:
    // Starts with the lowest addresses. What the memory holds does not change, so others may use it meanwhile; it must outlive this.
    Prefault(uint8_t* data, size_t bytes);
    ~Prefault();  // ends after the page at hand
    Prefault(const Prefault&) = delete;
    Prefault& operator=(const Prefault&) = delete;

    // Whether it is over: all pages are there, or the system has no such call or no more memory.
    bool done() const { return done_.load(std::memory_order_acquire); }

  private:
    std::atomic<bool> stop_{false}, done_{false};
    std::thread thread_;
};

}  // namespace octavo
