// The scorers for AVX2, F16C and FMA.
#include "attention_loops.hpp"
#include "lag_loops.hpp"

namespace lmcache_fast {

const ScoreKernels kAvx2Scores{"avx2", knorm, keydiff, lagkv, attention};

}  // namespace lmcache_fast
