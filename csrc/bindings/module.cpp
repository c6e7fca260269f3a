#include "bindings.hpp"

PYBIND11_MODULE(_native, module) {
    module.doc() = "Native core: shared regions, the run-copy engine, rotation, reused buffers.";
    module.attr("__version__") = LMCACHE_FAST_VERSION;
    lmcache_fast::register_shared_region(module);
    lmcache_fast::register_chunked_side(module);
    lmcache_fast::register_rotation(module);
    lmcache_fast::register_run_copy(module);
    lmcache_fast::register_buffer_pool(module);
    lmcache_fast::register_scores(module);
}
