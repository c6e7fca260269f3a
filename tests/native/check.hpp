// All the framework there is.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <stdexcept>

#define CHECK(condition)                                                                 \
    do {                                                                                 \
        if (!(condition)) {                                                              \
            std::fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition); \
            std::exit(1);                                                                \
        }                                                                                \
    } while (false)

template <typename Error = std::invalid_argument, typename Action>
bool throws(const Action& action) {
    try {
        action();
    } catch (const Error&) {
        return true;
    }
    return false;
}
