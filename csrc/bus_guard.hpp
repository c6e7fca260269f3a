// SIGBUS as an error: what touching a mapped file's missing pages ends in, when somebody made the
// file shorter or the file system is full.
#pragma once

#include <csetjmp>

namespace lmcache_fast {

/// Where the thread's SIGBUS goes; null: to whoever handled it before us.
extern thread_local sigjmp_buf* bus_error_return;

/// Puts our handler in place, in front of any other; cheap when it is there already.
void catch_bus_errors();

/// Calls `body`; false if it was cut short by a bus error. `body` must not throw, nor own anything
/// while it touches such memory: no destructor runs then.
template <typename Body>
bool survives_bus_error(const Body& body) {
    sigjmp_buf here;
    if (sigsetjmp(here, 0) != 0) return false;
    bus_error_return = &here;
    body();
    bus_error_return = nullptr;
    return true;
}

}  // namespace lmcache_fast
