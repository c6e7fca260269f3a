// What a row of keys looks like. Includes nothing with inline code: kernel files use it.
#pragma once

#include <cstdint>

namespace lmcache_fast {

enum class Element { kBFloat16, kFloat16, kFloat32 };

/// What a row of keys looks like: `num_heads` heads of `head_dim` elements, the first `rotary_dim`
/// of each rotated in pairs (j, j + rotary_dim / 2), or (2j, 2j + 1) when interleaved.
struct HeadShape {
    std::int64_t num_heads;
    std::int64_t head_dim;
    std::int64_t rotary_dim;
    bool interleaved;
    Element element;

    std::int64_t element_bytes() const { return element == Element::kFloat32 ? 4 : 2; }
    std::int64_t head_bytes() const { return head_dim * element_bytes(); }
    std::int64_t row_bytes() const { return num_heads * head_bytes(); }
};

}  // namespace lmcache_fast
