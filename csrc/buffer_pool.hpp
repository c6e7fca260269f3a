// Large buffers that are used again: a fresh one costs more in page faults than a copy into it.
#pragma once

#include <cstddef>
#include <list>
#include <memory>
#include <mutex>

namespace lmcache_fast {

class Buffer;

class BufferPool : public std::enable_shared_from_this<BufferPool> {
  public:
    /// Keeps at most `limit_bytes` of buffers that nobody uses.
    explicit BufferPool(std::size_t limit_bytes) : limit_(limit_bytes) {}
    ~BufferPool() { clear(); }
    BufferPool(const BufferPool&) = delete;
    BufferPool& operator=(const BufferPool&) = delete;

    /// A buffer of `bytes`, aligned to 2 MiB, its contents undefined. Throws std::bad_alloc.
    std::unique_ptr<Buffer> take(std::size_t bytes);
    /// Gives the unused buffers back to the system.
    void clear();
    std::size_t held_bytes() const;

  private:
    friend class Buffer;
    struct Block {
        std::byte* address;
        std::size_t capacity;
    };

    void give_back(const Block& block) noexcept;
    static Block map(std::size_t capacity);
    static void unmap(const Block& block) noexcept;

    const std::size_t limit_;
    mutable std::mutex mutex_;
    std::list<Block> held_;  // longest unused first
    std::size_t held_bytes_ = 0;
};

/// Memory taken from a pool; goes back to it when destroyed. Keeps the pool alive.
class Buffer {
  public:
    Buffer(std::shared_ptr<BufferPool> pool, BufferPool::Block block, std::size_t size)
        : pool_(std::move(pool)), block_(block), size_(size) {}
    ~Buffer() { pool_->give_back(block_); }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;

    std::byte* data() const { return block_.address; }
    std::size_t size() const { return size_; }

  private:
    std::shared_ptr<BufferPool> pool_;
    BufferPool::Block block_;
    std::size_t size_;
};

}  // namespace lmcache_fast
