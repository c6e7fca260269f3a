// The scorers for AVX2 and F16C.
#include "attention_loops.hpp"

namespace lmcache_fast {

const ScoreKernels kAvx2Scores{"avx2", knorm, keydiff, lag_spread, rank, attention};

}  // namespace lmcache_fast
