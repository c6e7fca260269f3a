#include "scores.hpp"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <system_error>
#include <vector>

#include "bus_guard.hpp"
#include "kernels/kernels.hpp"
#include "thread_pool.hpp"

namespace lmcache_fast {
namespace {

constexpr std::int64_t kKnormBytes = 1 << 20;  // a task

const ScoreKernels& score_kernels() {
#if defined(__x86_64__)
    for (const ScoreKernels* kernels : {&kAvx512Scores, &kAvx2Scores}) {
        if (std::strcmp(kernels->name, active_kernels().name) == 0) return *kernels;
    }
#endif
    return kPortableScores;
}

std::int64_t element_bytes(Element element) {
    return element == Element::kFloat32 ? 4 : 2;
}

/// The rows of each plane and layer.
class Rows {
  public:
    explicit Rows(const Scoring& scoring) : side_(scoring.side) {
        const ChunkShape& shape = side_.shape();
        const std::int64_t heads = num_heads(scoring);
        for (std::int64_t head = 0; head < heads; ++head) {
            head_offsets_.push_back(shape.piece_offset(head, heads));
        }
        rows_ = {side_.bases().data(),
                 shape.tokens_per_chunk,
                 shape.token_stride,
                 side_.num_tokens(),
                 heads,
                 scoring.head_dim,
                 head_offsets_.data(),
                 0};
    }
    ScoredRows at(std::int64_t plane, std::int64_t layer) const {
        ScoredRows rows = rows_;
        rows.offset = plane * side_.shape().plane_stride + layer * side_.shape().layer_stride;
        return rows;
    }
    std::int64_t tokens() const { return rows_.num_tokens; }
    std::int64_t heads() const { return rows_.num_heads; }

  private:
    const ChunkedSide& side_;
    std::vector<std::int64_t> head_offsets_;
    ScoredRows rows_;
};

class Scratch {
  public:
    explicit Scratch(std::int64_t bytes)
        : memory_(static_cast<std::byte*>(
              ::operator new(static_cast<std::size_t>(bytes), std::align_val_t{64}))) {}
    ~Scratch() { ::operator delete(memory_, std::align_val_t{64}); }
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;
    std::byte* get() const { return memory_; }

  private:
    std::byte* memory_;
};

/// Calls body(task, scratch) for all tasks on the pool's threads, `scratch_bytes` for each thread.
template <typename Body>
void run(const Scoring& scoring, std::int64_t tasks, std::int64_t scratch_bytes, const Body& body) {
    if (tasks == 0) return;
    const unsigned wanted = scoring.num_threads != 0 ? scoring.num_threads : default_num_threads();
    const auto threads = static_cast<unsigned>(std::min<std::int64_t>(wanted, tasks));
    // Before anything is touched: a thread of the pool must not throw.
    std::vector<std::unique_ptr<Scratch>> scratch;
    for (unsigned i = 0; i < threads; ++i) {
        scratch.push_back(std::make_unique<Scratch>(std::max<std::int64_t>(scratch_bytes, 64)));
    }
    std::atomic<unsigned> next{0};
    std::atomic<bool> intact{true};
    catch_bus_errors();
    ThreadPool::instance().run(threads, static_cast<std::size_t>(tasks), [&](TaskQueue& queue) {
        std::byte* const own = scratch[next.fetch_add(1)]->get();
        const bool survived = survives_bus_error([&] {
            for (std::size_t task = 0; queue.take(task);) {
                body(static_cast<std::int64_t>(task), own);
            }
        });
        if (!survived) intact = false;
    });
    if (!intact) {
        throw std::system_error(EFAULT, std::generic_category(),
                                "scores: memory went away while it was read: a mapped file was "
                                "made shorter");
    }
}

[[noreturn]] void refuse(const std::string& what) {
    throw std::invalid_argument("scores: " + what);
}

}  // namespace

std::int64_t num_heads(const Scoring& scoring) {
    const ChunkShape& shape = scoring.side.shape();
    const std::int64_t bytes = element_bytes(scoring.element);
    if (scoring.head_dim < 1 || scoring.head_dim > shape.row_bytes / bytes ||
        shape.row_bytes % (scoring.head_dim * bytes) != 0) {
        refuse("head_dim is " + std::to_string(scoring.head_dim) + "; expected whole heads in " +
               std::to_string(shape.row_bytes) + " bytes of " + std::to_string(bytes) +
               " an element");
    }
    const std::int64_t heads = shape.row_bytes / (scoring.head_dim * bytes);
    if (heads % shape.row_pieces != 0) {
        refuse("a row of " + std::to_string(heads) + " heads stands in " +
               std::to_string(shape.row_pieces) + " pieces; expected whole heads in each");
    }
    return heads;
}

void knorm_scores(const Scoring& scoring, double* out) {
    const Rows rows(scoring);
    const std::int64_t tokens = rows.tokens();
    const std::int64_t together =
        std::max<std::int64_t>(kKnormBytes / scoring.side.shape().row_bytes, 1);
    const std::int64_t parts = (tokens + together - 1) / together;
    const ScoreKernels& kernels = score_kernels();
    run(scoring, scoring.side.shape().layers * parts, 0, [&](std::int64_t task, std::byte*) {
        const std::int64_t layer = task / parts;
        const std::int64_t begin = task % parts * together;
        kernels.knorm(scoring.element, rows.at(0, layer), begin, std::min(begin + together, tokens),
                      scoring.reduce, out + layer * tokens + begin);
    });
}

void keydiff_scores(const Scoring& scoring, double* out) {
    const Rows rows(scoring);
    if (rows.tokens() == 0) return;
    const ScoreKernels& kernels = score_kernels();
    run(scoring, scoring.side.shape().layers,
        keydiff_scratch(rows.tokens(), rows.heads(), scoring.head_dim),
        [&](std::int64_t layer, std::byte* scratch) {
            kernels.keydiff(scoring.element, rows.at(0, layer), scoring.reduce, scratch,
                            out + layer * rows.tokens());
        });
}

void lagkv_scores(const Scoring& scoring, std::int64_t num_sink, std::int64_t lag,
                  bool cross_scoring, double* out) {
    const Rows rows(scoring);
    const std::int64_t tokens = rows.tokens();
    if (scoring.side.shape().planes != 2) refuse("one plane; expected keys and values apart");
    if (lag < 1 || num_sink < 0) {
        refuse("num_sink is " + std::to_string(num_sink) + " and lag is " + std::to_string(lag) +
               "; expected 0 or more and a positive number");
    }
    if (tokens < num_sink || (tokens - num_sink) / lag < 2) return;
    const LagPartitions how{num_sink, lag, (tokens - num_sink) / lag - 1, cross_scoring};
    const ScoreKernels& kernels = score_kernels();
    run(scoring, scoring.side.shape().layers, lagkv_scratch(how, rows.heads(), scoring.head_dim),
        [&](std::int64_t layer, std::byte* scratch) {
            kernels.lagkv(scoring.element, rows.at(0, layer), rows.at(1, layer), how,
                          scoring.reduce, scratch, out + layer * tokens);
        });
}

void attention_scores(const Scoring& scoring, const float* queries, std::int64_t query_heads,
                      std::int64_t window, std::int64_t kernel_size, double* out) {
    const Rows rows(scoring);
    const std::int64_t tokens = rows.tokens();
    const std::int64_t dim = padded(scoring.head_dim);
    if (query_heads < 1 || query_heads % rows.heads() != 0) {
        refuse(std::to_string(query_heads) + " heads of queries; expected a multiple of the " +
               std::to_string(rows.heads()) + " heads of keys");
    }
    if (window < 1 || kernel_size < 1 || kernel_size % 2 == 0 || kernel_size > INT32_MAX) {
        refuse("window is " + std::to_string(window) + " and kernel_size is " +
               std::to_string(kernel_size) +
               "; expected positive numbers, an odd kernel_size below 2^31");
    }
    if (tokens <= window) return;
    const std::int64_t room = query_heads * window * dim;  // floats
    const auto of_layer = [&](const float* values) {
        return Queries{values, query_heads / rows.heads(), window, kernel_size};
    };
    const std::int64_t own_bytes =
        attention_scratch(of_layer(nullptr), tokens, rows.heads(), scoring.head_dim);
    const ScoreKernels& kernels = score_kernels();
    run(scoring, scoring.side.shape().layers, own_bytes + 4 * room,
        [&](std::int64_t layer, std::byte* scratch) {
            float* const own = reinterpret_cast<float*>(scratch + own_bytes);
            const float* from = queries + layer * query_heads * window * scoring.head_dim;
            std::fill(own, own + room, 0.0F);
            for (std::int64_t query = 0; query < query_heads * window; ++query) {
                std::copy_n(from + query * scoring.head_dim, scoring.head_dim, own + query * dim);
            }
            kernels.attention(scoring.element, rows.at(0, layer), of_layer(own), scoring.reduce,
                              scratch, out + layer * tokens);
        });
}

}  // namespace lmcache_fast
