// Memory for weights, the arena and the KV pool: anonymous (zeroed, touched on first use) or a mapped file, on huge pages where the
// system allows.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace octavo {

class Region {
  public:
    // Throws std::bad_alloc when the address space cannot be had.
    explicit Region(size_t bytes);
    // The first `bytes` of a file, shared with whoever else maps it. To be read: a write is a fault. To be filled (`writable`): what
    // is written reaches the file. Throws std::system_error with the system's reason, and std::length_error when the file is shorter.
    static std::shared_ptr<Region> map_file(const std::string& path, size_t bytes, bool writable);
    ~Region();
    Region(const Region&) = delete;
    Region& operator=(const Region&) = delete;

    uint8_t* data() const { return data_; }
    size_t size() const { return size_; }
    size_t used() const { return used_; }
    // Next `bytes`, 64-byte aligned; throws std::length_error when the region is full.
    uint8_t* take(size_t bytes);
    // Of a file being filled: writes all of it out and lets go of the memory that held it. Throws std::system_error.
    void flush();

  private:
    Region() = default;
    uint8_t* data_ = nullptr;
    size_t size_ = 0, mapped_ = 0, used_ = 0;
    void* base_ = nullptr;
    bool file_ = false;
};

}  // namespace octavo
