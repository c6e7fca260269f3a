#include "thread_pool.hpp"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <cfenv>
#include <cstdlib>
#include <system_error>
#include <thread>

namespace lmcache_fast {
namespace {

constexpr unsigned kDefaultMaxThreads = 8;
constexpr unsigned kMaxThreads = 256;
constexpr int kSpins = 2000;  // some tens of microseconds: between two copies of one request

// Never destroyed: detached workers wait in it until the process ends.
std::atomic<ThreadPool*> current_pool{nullptr};

void forget_pool_in_child() {
    current_pool.store(nullptr);
}

void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

/// Rounds to nearest and keeps denormals, whatever the caller has set: what is computed must not
/// depend on which thread does it.
class DefaultFloats {
  public:
    DefaultFloats() {
        std::fegetenv(&before_);
        std::fesetenv(FE_DFL_ENV);
    }
    ~DefaultFloats() { std::fesetenv(&before_); }
    DefaultFloats(const DefaultFloats&) = delete;
    DefaultFloats& operator=(const DefaultFloats&) = delete;

  private:
    std::fenv_t before_;
};

unsigned usable_cores() {
    cpu_set_t set;
    CPU_ZERO(&set);
    if (::sched_getaffinity(0, sizeof(set), &set) == 0) {
        return static_cast<unsigned>(std::max(1, CPU_COUNT(&set)));
    }
    return std::max(1U, std::thread::hardware_concurrency());
}

}  // namespace

unsigned default_num_threads() {
    if (const char* text = std::getenv("LMCACHE_FAST_NUM_THREADS")) {
        char* end = nullptr;
        const long value = std::strtol(text, &end, 10);
        if (end != text && *end == '\0' && value >= 1) {
            return static_cast<unsigned>(std::min<long>(value, kMaxThreads));
        }
    }
    static const unsigned cores = std::min(usable_cores(), kDefaultMaxThreads);
    return cores;
}

ThreadPool& ThreadPool::instance() {
    static const int registered = ::pthread_atfork(nullptr, nullptr, forget_pool_in_child);
    (void)registered;
    ThreadPool* pool = current_pool.load(std::memory_order_acquire);
    if (pool == nullptr) {
        auto* fresh = new ThreadPool;
        if (current_pool.compare_exchange_strong(pool, fresh)) return *fresh;
        delete fresh;
    }
    return *pool;
}

void ThreadPool::run(unsigned threads, std::size_t tasks, const Body& body) {
    const DefaultFloats for_workers_too;  // which inherit it
    TaskQueue queue(tasks);
    threads = std::clamp(threads, 1U, kMaxThreads);  // the caller itself is one of them
    const auto helpers =
        static_cast<unsigned>(std::min<std::size_t>(threads, std::max<std::size_t>(tasks, 1)) - 1);
    std::unique_lock<std::mutex> mine(callers_, std::defer_lock);
    if (helpers == 0 || !mine.try_lock()) {
        body(queue);
        return;
    }
    Job job{&body, &queue, helpers};
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        try {
            for (; workers_ < helpers; ++workers_) std::thread(&ThreadPool::work, this).detach();
        } catch (const std::system_error&) {
            // No more threads to be had: fewer workers do the same job.
        }
        job_ = &job;
        generation_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
    body(queue);
    std::unique_lock<std::mutex> lock(mutex_);
    job_ = nullptr;  // who has not joined by now is not waited for
    done_.wait(lock, [this] { return running_ == 0; });
}

void ThreadPool::work() {
    std::uint64_t seen = 0;
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
        if (job_ != nullptr && generation_ != seen && job_->seats > 0) {
            seen = generation_;
            --job_->seats;
            ++running_;
            const Job job = *job_;
            lock.unlock();
            (*job.body)(*job.queue);
            lock.lock();
            if (--running_ == 0) done_.notify_one();
            continue;
        }
        seen = generation_;
        lock.unlock();
        for (int i = 0; i < kSpins && generation_.load(std::memory_order_acquire) == seen; ++i) {
            relax();
        }
        lock.lock();
        wake_.wait(lock, [&] { return generation_ != seen; });
    }
}

}  // namespace lmcache_fast
