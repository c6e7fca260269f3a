// The scorers for every processor.
#include "attention_loops.hpp"

namespace lmcache_fast {

const ScoreKernels kPortableScores{"portable", knorm, keydiff, lag_spread, rank, attention};

}  // namespace lmcache_fast
