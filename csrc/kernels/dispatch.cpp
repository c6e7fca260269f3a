#include <atomic>
#include <cstring>

#include "kernels.hpp"

namespace lmcache_fast {
namespace {

struct Supported {
    const Kernels* sets[3] = {};
    std::size_t count = 0;

    Supported() {
        const Kernels* const compiled[] = {
#if defined(__x86_64__)
            &kAvx512Kernels, &kAvx2Kernels,
#elif defined(__aarch64__)
            &kNeonKernels,
#endif
            &kPortableKernels};
        for (const Kernels* set : compiled) {
            if (set->supported()) sets[count++] = set;
        }
    }
};

const Supported& supported() {
    static const Supported found;
    return found;
}

std::atomic<const Kernels*> chosen{nullptr};

}  // namespace

const Kernels* const* supported_kernels(std::size_t& count) {
    count = supported().count;
    return supported().sets;
}

const Kernels& active_kernels() {
    const Kernels* set = chosen.load(std::memory_order_acquire);
    return set != nullptr ? *set : *supported().sets[0];
}

bool set_kernels(const char* name) {
    for (std::size_t i = 0; i < supported().count; ++i) {
        if (std::strcmp(supported().sets[i]->name, name) == 0) {
            chosen.store(supported().sets[i], std::memory_order_release);
            return true;
        }
    }
    return false;
}

}  // namespace lmcache_fast
