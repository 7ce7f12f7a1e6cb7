// Functions of the elements of a row: exponentials, SiLU and the norm.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "products.h"
#include "vectors.h"

namespace {

inline double exponential(double x) { return std::exp(x); }

// e^x as 2^n times a polynomial of degree 6 in the rest, with a relative error below 2e-7. V: a float or a
// vector of them, I: as many 32-bit integers. At LOWEST the power is 2^-127, whose bits are those of 0, so
// that excluded tokens have no probability.
constexpr float LOWEST = -88.0f, HIGHEST = 88.0f;
template <typename V, typename I, typename Convert>
inline V exponential_of(V x, const Convert& to_integers) {
  const V shift = V{} + 12582912.0f;  // 1.5 * 2^23: adding it rounds to integers
  const V n = (x * 1.44269504f + shift) - shift;
  const V r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  V p = V{} + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  const I bits = (to_integers(n) + 127) << 23;
  V power;
  std::memcpy(&power, &bits, sizeof power);
  return p * power;
}

inline float exponential(float x) {
  x = x < LOWEST ? LOWEST : x > HIGHEST ? HIGHEST : x;  // keeps NaN
  return exponential_of<float, int32_t>(x, [](float n) { return int32_t(n); });
}

inline Vector<float> exponential(Vector<float> x) {
  typedef int32_t Integers __attribute__((vector_size(VECTOR_BYTES)));
  const Vector<float> lowest = Vector<float>{} + LOWEST, highest = Vector<float>{} + HIGHEST;
  x = x < lowest ? lowest : x > highest ? highest : x;
  return exponential_of<Vector<float>, Integers>(
      x, [](Vector<float> n) { return __builtin_convertvector(n, Integers); });
}

// gate = SiLU(gate) * up, of PIECE elements.
inline void activate(double* gate, const double* up) {
  for (int i = 0; i < PIECE; ++i) gate[i] = gate[i] / (1 + exponential(-gate[i])) * up[i];
}
inline void activate(float* gate, const float* up) {
  for (int i = 0; i < PIECE; i += VectorOf<float>::lanes) {
    const Vector<float> x = load(gate + i);
    store(gate + i, x / (exponential(-x) + 1.0f) * load(up + i));
  }
}

// The largest of some numbers, without regard to NaN.
template <typename A>
inline A largest(const A* x, int64_t count) {
  constexpr int lanes = VectorOf<A>::lanes;
  const A lowest = -std::numeric_limits<A>::infinity();
  Vector<A> most = Vector<A>{} + lowest;
  int64_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    const Vector<A> part = load(x + i);
    most = part > most ? part : most;
  }
  A found = lowest;
  for (int lane = 0; lane < lanes; ++lane) found = std::max(found, most[lane]);
  for (; i < count; ++i) found = std::max(found, x[i]);
  return found;
}

// scores = e^((scores - most) * scale); returns their sum. The order of its terms depends on their number alone.
inline double exponentials(double* scores, int64_t count, double most, double scale = 1) {
  double sum = 0;
  for (int64_t i = 0; i < count; ++i) sum += scores[i] = exponential((scores[i] - most) * scale);
  return sum;
}

inline float exponentials(float* scores, int64_t count, float most, float scale = 1) {
  constexpr int lanes = VectorOf<float>::lanes;
  Vector<float> sums = {};
  int64_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    const Vector<float> x = exponential((load(scores + i) - most) * scale);
    store(scores + i, x);
    sums += x;
  }
  float sum = total<float>(sums);
  for (; i < count; ++i) sum += scores[i] = exponential((scores[i] - most) * scale);
  return sum;
}

// y = x / rms(x) * weight, over K elements; y may be x.
template <typename T, typename Y>
inline void rms_norm(const Sum<T>* x, const T* weight, int64_t K, double eps, Y* y) {
  using A = Sum<T>;
  constexpr int lanes = VectorOf<A>::lanes;
  Vector<A> squares = {};
  int64_t k = 0;
  for (; k + lanes <= K; k += lanes) {
    const Vector<A> part = load(x + k);
    squares += part * part;
  }
  A sum = total<A>(squares);
  for (; k < K; ++k) add_product(sum, x[k], x[k]);
  const A scale = A(1) / std::sqrt(sum / A(K) + A(eps));
  for (k = 0; k + lanes <= K; k += lanes) store(y + k, load(x + k) * scale * load(weight + k));
  for (; k < K; ++k) store(y + k, x[k] * scale * widen(weight[k]));
}

// Turns a head of D elements to its position (rope.py).
template <typename A>
inline void rotate(A* x, const A* cosines, const A* sines, int D) {
  constexpr int lanes = VectorOf<A>::lanes;
  const int half = D / 2;
  int d = 0;
  for (; d + lanes <= half; d += lanes) {
    const Vector<A> low = load(x + d), high = load(x + half + d);
    store(x + d, low * load(cosines + d) + high * load(sines + d));
    store(x + half + d, high * load(cosines + half + d) + low * load(sines + half + d));
  }
  for (; d < half; ++d) {
    const A low = x[d], high = x[half + d];
    x[d] = low * cosines[d] + high * sines[d];
    x[half + d] = high * cosines[half + d] + low * sines[half + d];
  }
}

}  // namespace
