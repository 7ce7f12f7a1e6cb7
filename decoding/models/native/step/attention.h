// A query's scores of keys, and its sum of values.
//
// Shapes: D head size.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>

#include "vectors.h"

namespace {

// Writes the products of a query with `count` keys in a row, times `scale`, and returns the largest.
template <typename T>
inline Sum<T> score_keys(const T* keys, int64_t count, const Sum<T>* query, int D, Sum<T> scale, Sum<T>* scores) {
  using A = Sum<T>;
  constexpr int lanes = VectorOf<A>::lanes;
  A most = -std::numeric_limits<A>::infinity();
  for (int64_t i = 0; i < count; i += 4, keys += 4 * D) {
    const int keys_here = int(std::min<int64_t>(4, count - i));
    Vector<A> sums[4] = {};
    int d = 0;
    for (; d + lanes <= D; d += lanes) {
      const Vector<A> part = load(query + d);
      for (int j = 0; j < keys_here; ++j) sums[j] += load(keys + j * D + d) * part;
    }
    A sum[4];
    totals(sums, sum);
    for (int j = 0; j < keys_here; ++j) {
      for (int rest = d; rest < D; ++rest) add_product(sum[j], widen(keys[j * D + rest]), query[rest]);
      scores[i + j] = sum[j] * scale;
      most = std::max(most, scores[i + j]);
    }
  }
  return most;
}

// Adds `count` values in a row, times their weights, to `out`: `vectors` vectors at a time in registers.
template <int vectors, typename T>
inline void add_block(const T* values, int64_t count, const Sum<T>* weights, int D, Sum<T>* out) {
  using A = Sum<T>;
  constexpr int lanes = VectorOf<A>::lanes;
  Vector<A> sums[vectors];
  std::memcpy(sums, out, sizeof sums);
  for (int64_t i = 0; i < count; ++i, values += D) {
    const A weight = weights[i];
#pragma GCC unroll 8
    for (int v = 0; v < vectors; ++v) sums[v] += weight * load(values + v * lanes);
  }
  std::memcpy(out, sums, sizeof sums);
}

template <typename T>
inline void add_values(const T* values, int64_t count, const Sum<T>* weights, int D, Sum<T>* out) {
  constexpr int lanes = VectorOf<Sum<T>>::lanes;
  int d = 0;
  for (; d + 8 * lanes <= D; d += 8 * lanes) add_block<8>(values + d, count, weights, D, out + d);
  for (; d + lanes <= D; d += lanes) add_block<1>(values + d, count, weights, D, out + d);
  for (; d < D; ++d)
    for (int64_t i = 0; i < count; ++i) add_product(out[d], weights[i], widen(values[i * D + d]));
}

}  // namespace
