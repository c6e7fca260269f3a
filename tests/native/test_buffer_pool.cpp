// Buffers come back, are given out again, and never exceed the limit while unused.
#include <cstdint>
#include <cstring>
#include <new>
#include <thread>
#include <vector>

#include "buffer_pool.hpp"
#include "check.hpp"

using namespace lmcache_fast;

int main() {
    constexpr std::size_t kHuge = std::size_t{2} << 20;
    const auto pool = std::make_shared<BufferPool>(3 * kHuge);
    {
        const auto first = pool->take(kHuge + 1);
        CHECK(first->size() == kHuge + 1);
        CHECK(reinterpret_cast<std::uintptr_t>(first->data()) % kHuge == 0);
        std::memset(first->data(), 1, first->size());
        CHECK(pool->held_bytes() == 0);
    }
    CHECK(pool->held_bytes() == 2 * kHuge);
    {
        const auto again = pool->take(2 * kHuge);
        CHECK(pool->held_bytes() == 0);
        const auto other = pool->take(2 * kHuge);
        CHECK(other->data() != again->data());
    }
    CHECK(pool->held_bytes() == 2 * kHuge);  // the limit has room for one of them
    pool->take(0);
    pool->take(100);  // far smaller: gets memory of its own
    CHECK(pool->held_bytes() > 2 * kHuge && pool->held_bytes() <= 3 * kHuge);
    pool->clear();
    CHECK(pool->held_bytes() == 0);
    CHECK(throws<std::bad_alloc>([&] { pool->take(SIZE_MAX); }));

    std::vector<std::thread> threads;
    for (int i = 0; i < 4; ++i) {
        threads.emplace_back([pool] {
            for (int j = 0; j < 50; ++j) {
                const auto buffer = pool->take(static_cast<std::size_t>(1000 * (j % 7 + 1)));
                std::memset(buffer->data(), j, buffer->size());
            }
        });
    }
    for (std::thread& thread : threads) thread.join();
    std::unique_ptr<Buffer> last = std::make_shared<BufferPool>(0)->take(10);  // outlives its pool
    last->data()[9] = std::byte{1};
    last.reset();
}
