#include "buffer_pool.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <new>

namespace lmcache_fast {
namespace {

constexpr std::size_t kHugePage = std::size_t{2} << 20;
constexpr std::size_t kPage = std::size_t{64} << 10;  // at least a page, on every processor

std::size_t capacity_for(std::size_t bytes) {
    const std::size_t unit = bytes < kHugePage ? kPage : kHugePage;
    if (bytes > SIZE_MAX - 2 * kHugePage) throw std::bad_alloc();
    return (std::max<std::size_t>(bytes, 1) + unit - 1) / unit * unit;
}

}  // namespace

std::unique_ptr<Buffer> BufferPool::take(std::size_t bytes) {
    const std::size_t capacity = capacity_for(bytes);
    Block block{nullptr, 0};
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        auto best = held_.end();
        for (auto it = held_.begin(); it != held_.end(); ++it) {
            // Not one of twice the size: it would pin down memory that nobody needs.
            if (it->capacity < capacity || it->capacity / 2 > capacity) continue;
            if (best == held_.end() || it->capacity <= best->capacity) best = it;
        }
        if (best != held_.end()) {
            block = *best;
            held_bytes_ -= block.capacity;
            held_.erase(best);
        }
    }
    if (block.address == nullptr) block = map(capacity);
    return std::make_unique<Buffer>(shared_from_this(), block, bytes);
}

void BufferPool::clear() {
    std::list<Block> unused;
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        unused.swap(held_);
        held_bytes_ = 0;
    }
    for (const Block& block : unused) unmap(block);
}

std::size_t BufferPool::held_bytes() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return held_bytes_;
}

void BufferPool::give_back(const Block& block) noexcept {
    std::list<Block> evicted;
    try {
        const std::lock_guard<std::mutex> lock(mutex_);
        held_.push_back(block);
        held_bytes_ += block.capacity;
        while (held_bytes_ > limit_) {
            held_bytes_ -= held_.front().capacity;
            evicted.splice(evicted.end(), held_, held_.begin());
        }
    } catch (const std::bad_alloc&) {
        unmap(block);
    }
    for (const Block& old : evicted) unmap(old);
}

BufferPool::Block BufferPool::map(std::size_t capacity) {
    const std::size_t reserved = capacity + kHugePage;
    void* start =
        ::mmap(nullptr, reserved, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (start == MAP_FAILED) throw std::bad_alloc();
    auto* begin = static_cast<std::byte*>(start);
    const std::size_t skipped = (~reinterpret_cast<std::uintptr_t>(begin) + 1) % kHugePage;
    std::byte* address = begin + skipped;
    if (skipped != 0) ::munmap(begin, skipped);
    ::munmap(address + capacity, reserved - skipped - capacity);
    ::madvise(address, capacity, MADV_HUGEPAGE);  // a hint: works without
    return {address, capacity};
}

void BufferPool::unmap(const Block& block) noexcept {
    ::munmap(block.address, block.capacity);
}

}  // namespace lmcache_fast
