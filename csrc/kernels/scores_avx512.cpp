// The scorers for AVX-512 F, BW and VL.
#include "attention_loops.hpp"

namespace lmcache_fast {

const ScoreKernels kAvx512Scores{"avx512", knorm, keydiff, lag_spread, rank, attention};

}  // namespace lmcache_fast
