// Regions of anonymous memory and of mapped files, aligned to huge pages.
#include "memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <new>
#include <stdexcept>
#include <string>
#include <system_error>
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>

#include <cstdlib>
#include <cstring>
#endif

namespace octavo {

namespace {

constexpr size_t kHugePage = size_t{2} << 20;

[[noreturn]] void fail(const std::string& path) { throw std::system_error(errno, std::generic_category(), path); }

struct Descriptor {
    int number;
    ~Descriptor() { close(number); }
};

}  // namespace

std::shared_ptr<Region> Region::map_file(const std::string& path, size_t bytes, bool writable) {
    // O_NONBLOCK: opening a FIFO somebody put there must not hang.
    const Descriptor file{open(path.c_str(), (writable ? O_RDWR : O_RDONLY) | O_CLOEXEC | O_NONBLOCK)};
    if (file.number < 0) fail(path);
    struct stat status {};
    if (fstat(file.number, &status)) fail(path);
    if (!S_ISREG(status.st_mode) || bytes == 0 || (size_t)status.st_size < bytes)
        throw std::length_error(path + " is " + std::to_string(status.st_size) + " bytes long, " + std::to_string(bytes) + " are needed");
    std::shared_ptr<Region> region(new Region());
    region->size_ = bytes;
    region->mapped_ = bytes + kHugePage;
    region->file_ = true;
    // Room in which the file can begin where huge pages do, so that those of the page cache can be used as such.
    region->base_ = mmap(nullptr, region->mapped_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (region->base_ == MAP_FAILED) fail(path);
    const uintptr_t start = ((uintptr_t)region->base_ + kHugePage - 1) / kHugePage * kHugePage;
    const int protection = writable ? PROT_READ | PROT_WRITE : PROT_READ;
    if (mmap((void*)start, bytes, protection, MAP_SHARED | MAP_FIXED, file.number, 0) == MAP_FAILED) fail(path);
#if defined(MADV_HUGEPAGE)
    if (!writable) madvise((void*)start, bytes, MADV_HUGEPAGE);  // only advice
#endif
    region->data_ = (uint8_t*)start;
    return region;
}

void Region::flush() {
    if (!file_) throw std::logic_error("a region of anonymous memory has no file to be written to");
    if (msync(data_, size_, MS_SYNC)) fail("writing a mapped file");
    madvise(data_, size_, MADV_DONTNEED);
}

#if defined(__SANITIZE_ADDRESS__)

// From the heap, so that reading past the end, or between what was taken, is found.
Region::Region(size_t bytes) : size_(bytes) {
    if (posix_memalign(&base_, 64, bytes ? bytes : 1)) throw std::bad_alloc();
    data_ = (uint8_t*)base_;
    std::memset(data_, 0, bytes);
}

Region::~Region() {
    if (file_) {
        if (base_ && base_ != MAP_FAILED) munmap(base_, mapped_);
        return;
    }
    ASAN_UNPOISON_MEMORY_REGION(data_, size_);
    std::free(base_);
}

#else

Region::Region(size_t bytes) : size_(bytes) {
    // Read bandwidth of two threads: about 30 GB/s on 4 KiB pages, 52 on huge ones. Small regions would only waste a huge page.
    const bool huge = bytes >= kHugePage;
    mapped_ = bytes + (huge ? kHugePage : 64);
    base_ = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base_ == MAP_FAILED) throw std::bad_alloc();
    uintptr_t start = (uintptr_t)base_;
    if (huge) {
        start = (start + kHugePage - 1) / kHugePage * kHugePage;
        madvise((void*)start, bytes, MADV_HUGEPAGE);  // only advice: the region works without
    }
    data_ = (uint8_t*)start;
}

Region::~Region() {
    if (base_ && base_ != MAP_FAILED) munmap(base_, mapped_);
}

#endif

uint8_t* Region::take(size_t bytes) {
    const size_t begin = (used_ + 63) / 64 * 64;
    if (begin > size_ || bytes > size_ - begin)
        throw std::length_error("region of " + std::to_string(size_) + " bytes is full: " + std::to_string(bytes) + " wanted, " +
                                std::to_string(size_ - used_) + " left");
#if defined(__SANITIZE_ADDRESS__)
    if (!file_) {
        ASAN_POISON_MEMORY_REGION(data_ + used_, size_ - used_);
        ASAN_UNPOISON_MEMORY_REGION(data_ + begin, bytes);
    }
#endif
    used_ = begin + bytes;
    return data_ + begin;
}

}  // namespace octavo
