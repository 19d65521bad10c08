// Anonymous memory for weights, the arena and the KV pool: zeroed, on huge pages where the system allows, touched on first use.
#pragma once
#include <cstddef>
#include <cstdint>

namespace octavo {

class Region {
  public:
    // Throws std::bad_alloc when the address space cannot be had.
    explicit Region(size_t bytes);
    ~Region();
    Region(const Region&) = delete;
    Region& operator=(const Region&) = delete;

    uint8_t* data() const { return data_; }
    size_t size() const { return size_; }
    size_t used() const { return used_; }
    // Next `bytes`, 64-byte aligned; throws std::length_error when the region is full.
    uint8_t* take(size_t bytes);

  private:
    uint8_t* data_ = nullptr;
    size_t size_ = 0, mapped_ = 0, used_ = 0;
    void* base_ = nullptr;
};

}  // namespace octavo
