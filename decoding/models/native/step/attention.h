// The scores of keys of some queries, and their sums of values.
//
// The query heads that share a key/value head are computed together, so that each key and value is read once.
// Shapes: D head size.

#pragma once

#include <cstdint>
#include <cstring>

#include "products.h"
#include "vectors.h"

namespace {

constexpr int MOST_HEADS = 4;  // query heads that are computed together

// Writes the products of `heads` queries, (heads, D), with `count` keys in a row to rows of `scores` that are
// `stride` apart.
template <int heads, int count, typename T>
inline void score_block(const T* keys, const Input<T>* queries, int D, Sum<T>* scores, int64_t stride) {
  using A = Sum<T>;
  using Step = Multiply<T>;
  Vector<A> sums[heads][count] = {};
  int d = 0;
  for (; d + Step::elements <= D; d += Step::elements)
#pragma GCC unroll 4
    for (int j = 0; j < count; ++j) {
      const typename Step::Part key = Step::part(keys + j * D + d);
#pragma GCC unroll 4
      for (int head = 0; head < heads; ++head) Step::add(sums[head][j], key, Step::part(queries + head * D + d));
    }
#pragma GCC unroll 4
  for (int head = 0; head < heads; ++head) {
    A sum[count];
    if constexpr (count == 4)
      totals(sums[head], sum);
    else
      sum[0] = total<A>(sums[head][0]);
    for (int rest = d; rest < D; ++rest)
      for (int j = 0; j < count; ++j)
        add_product(sum[j], A(widen(keys[j * D + rest])), A(widen(queries[head * D + rest])));
    std::memcpy(scores + head * stride, sum, sizeof sum);
  }
}

template <int heads, typename T>
inline void score_keys(const T* keys, int64_t count, const Input<T>* queries, int D, Sum<T>* scores,
                       int64_t stride) {
  int64_t i = 0;
  for (; i + 4 <= count; i += 4) score_block<heads, 4>(keys + i * D, queries, D, scores + i, stride);
  for (; i < count; ++i) score_block<heads, 1>(keys + i * D, queries, D, scores + i, stride);
}

// Adds `count` values in a row, times each head's weights, to `out`, (heads, D): `vectors` vectors at a time in
// registers. Weights of the heads are `stride` apart.
template <int heads, int vectors, typename T>
inline void add_block(const T* values, int64_t count, const Sum<T>* weights, int64_t stride, int D, Sum<T>* out) {
  using A = Sum<T>;
  constexpr int lanes = VectorOf<A>::lanes;
  Vector<A> sums[heads][vectors];
  for (int head = 0; head < heads; ++head) std::memcpy(sums[head], out + head * D, sizeof sums[head]);
  for (int64_t i = 0; i < count; ++i, values += D)
#pragma GCC unroll 8
    for (int v = 0; v < vectors; ++v) {
      const Vector<A> value = load(values + v * lanes);
#pragma GCC unroll 4
      for (int head = 0; head < heads; ++head) sums[head][v] += weights[head * stride + i] * value;
    }
  for (int head = 0; head < heads; ++head) std::memcpy(out + head * D, sums[head], sizeof sums[head]);
}

template <int heads, typename T>
inline void add_values(const T* values, int64_t count, const Sum<T>* weights, int64_t stride, int D, Sum<T>* out) {
  constexpr int lanes = VectorOf<Sum<T>>::lanes, vectors = VECTOR_BYTES == 64 ? 4 : 2;
  int d = 0;
  for (; d + vectors * lanes <= D; d += vectors * lanes)
    add_block<heads, vectors>(values + d, count, weights, stride, D, out + d);
  for (; d + lanes <= D; d += lanes) add_block<heads, 1>(values + d, count, weights, stride, D, out + d);
  for (; d < D; ++d)
    for (int head = 0; head < heads; ++head)
      for (int64_t i = 0; i < count; ++i)
        add_product(out[head * D + d], weights[head * stride + i], Sum<T>(widen(values[i * D + d])));
}

}  // namespace
