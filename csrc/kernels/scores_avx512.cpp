// The scorers for AVX-512 F, BW and VL.
#include "attention_loops.hpp"
#include "lag_loops.hpp"

namespace lmcache_fast {

const ScoreKernels kAvx512Scores{"avx512", knorm, keydiff, lagkv, attention};

}  // namespace lmcache_fast
