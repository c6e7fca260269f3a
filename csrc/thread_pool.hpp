// A small persistent thread pool for memory-bound loops. The calling thread takes part.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>

namespace lmcache_fast {

/// The task numbers of one job, handed out in order to whichever thread asks next.
class TaskQueue {
  public:
    explicit TaskQueue(std::size_t count) : count_(count) {}
    /// Puts the next task's number into `index`; false when there is none left.
    bool take(std::size_t& index) {
        index = next_.fetch_add(1, std::memory_order_relaxed);
        return index < count_;
    }

  private:
    alignas(64) std::atomic<std::size_t> next_{0};
    const std::size_t count_;
};

/// LMCACHE_FAST_NUM_THREADS, else the cores this process may use, at most 8.
unsigned default_num_threads();

class ThreadPool {
  public:
    using Body = std::function<void(TaskQueue&)>;

    /// The process's pool; a forked child gets a new one, for threads do not survive a fork.
    static ThreadPool& instance();

    /// Calls `body` once on each thread that takes part, with one queue of `tasks` numbers, and
    /// returns when all are done. `body` must not throw. When another caller has the workers, the
    /// calling thread does everything itself.
    void run(unsigned threads, std::size_t tasks, const Body& body);

  private:
    struct Job {
        const Body* body;
        TaskQueue* queue;
        unsigned seats;  // workers that may still join
    };

    void work();

    std::mutex callers_;  // held by the caller that has the workers
    std::mutex mutex_;    // guards everything below
    std::condition_variable wake_;
    std::condition_variable done_;
    Job* job_ = nullptr;
    unsigned workers_ = 0;
    unsigned running_ = 0;
    std::atomic<std::uint64_t> generation_{0};  // counts jobs, so that idle workers may spin on it
};

}  // namespace lmcache_fast
