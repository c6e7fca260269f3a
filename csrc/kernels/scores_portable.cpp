// The scorers for every processor.
#include "attention_loops.hpp"
#include "lag_loops.hpp"

namespace lmcache_fast {

const ScoreKernels kPortableScores{"portable", knorm, keydiff, lagkv, attention};

}  // namespace lmcache_fast
