// Every task runs exactly once, from several callers at a time, and in a forked child.
#include <sys/wait.h>
#include <unistd.h>

#include <memory>
#include <thread>
#include <vector>

#include "check.hpp"
#include "thread_pool.hpp"

using namespace lmcache_fast;

namespace {

void every_task_runs_once(unsigned threads, std::size_t tasks) {
    const auto seen = std::make_unique<std::atomic<int>[]>(tasks);
    std::size_t plain_sum = 0;  // written by one task only: run() must hand it over
    ThreadPool::instance().run(threads, tasks, [&](TaskQueue& queue) {
        for (std::size_t i = 0; queue.take(i);) {
            seen[i].fetch_add(1, std::memory_order_relaxed);
            if (i + 1 == tasks) plain_sum = tasks;
        }
    });
    CHECK(plain_sum == tasks);
    for (std::size_t i = 0; i < tasks; ++i) CHECK(seen[i] == 1);
}

}  // namespace

int main() {
    CHECK(default_num_threads() >= 1);
    for (const unsigned threads : {1U, 2U, 5U}) {
        for (const std::size_t tasks : {0UL, 1UL, 2UL, 1000UL})
            every_task_runs_once(threads, tasks);
    }
    for (int i = 0; i < 300; ++i) every_task_runs_once(3, 20);
    std::vector<std::thread> callers;
    for (int i = 0; i < 4; ++i) {
        callers.emplace_back([] {
            for (int j = 0; j < 100; ++j) every_task_runs_once(3, 30);
        });
    }
    for (std::thread& caller : callers) caller.join();
#if !defined(__SANITIZE_THREAD__)  // it does not support threads in a forked child
    const pid_t child = ::fork();
    if (child == 0) {
        every_task_runs_once(3, 100);
        ::_exit(0);
    }
    int status = 0;
    CHECK(::waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
#endif
}
