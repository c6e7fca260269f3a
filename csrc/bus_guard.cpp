#include "bus_guard.hpp"

#include <csignal>
#include <mutex>

namespace lmcache_fast {

thread_local sigjmp_buf* bus_error_return = nullptr;

namespace {

struct sigaction previous{};  // who handled it before us
volatile std::sig_atomic_t passed_on = 0;

void on_bus_error(int signal, siginfo_t*, void*) {
    if (sigjmp_buf* const there = bus_error_return) {
        bus_error_return = nullptr;
        siglongjmp(*there, 1);
    }
    // Not ours. The second time means that the other handler handed it back to us.
    if (passed_on != 0) previous.sa_handler = SIG_DFL;
    passed_on = 1;
    ::sigaction(SIGBUS, &previous, nullptr);
    ::raise(signal);
}

}  // namespace

void catch_bus_errors() {
    static std::mutex mutex;
    const std::lock_guard<std::mutex> lock(mutex);
    struct sigaction current{};
    if (::sigaction(SIGBUS, nullptr, &current) != 0) return;
    if ((current.sa_flags & SA_SIGINFO) != 0 && current.sa_sigaction == on_bus_error) return;
    struct sigaction ours{};
    ours.sa_sigaction = on_bus_error;
    ours.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;  // not blocked after the jump
    sigemptyset(&ours.sa_mask);
    previous = current;
    passed_on = 0;
    ::sigaction(SIGBUS, &ours, nullptr);
}

}  // namespace lmcache_fast
