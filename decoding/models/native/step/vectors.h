// Numbers and vectors of them: the types of weights, sums and inputs, and the order in which lanes are added.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int VECTOR_BYTES = 64;
#elif defined(__AVX__)
constexpr int VECTOR_BYTES = 32;
#else
constexpr int VECTOR_BYTES = 16;
#endif

struct BFloat16 {
  uint16_t bits;
};

// The type in which sums of T are accumulated and activations are kept.
template <typename T>
using Sum = std::conditional_t<std::is_same_v<T, double>, double, float>;

// The type in which products read their inputs: bfloat16 where the processor multiplies pairs of it.
#if defined(__AVX512BF16__)
template <typename T>
using Input = std::conditional_t<std::is_same_v<T, BFloat16>, BFloat16, Sum<T>>;
#else
template <typename T>
using Input = Sum<T>;
#endif

template <typename A>
struct VectorOf {
  typedef A type __attribute__((vector_size(VECTOR_BYTES)));
  static constexpr int lanes = VECTOR_BYTES / sizeof(A);
};
template <typename A>
using Vector = typename VectorOf<A>::type;

inline float widen(float x) { return x; }
inline double widen(double x) { return x; }
inline float widen(BFloat16 x) {
  uint32_t bits = uint32_t(x.bits) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline void store(float* place, float x) { *place = x; }
inline void store(double* place, double x) { *place = x; }
inline void store(BFloat16* place, float x) {  // rounds to nearest, ties to even; keeps NaN
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  if (x != x) {
    place->bits = 0x7fc0;
    return;
  }
  place->bits = uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

template <typename A>
inline Vector<A> load(const A* place) {
  Vector<A> x;
  std::memcpy(&x, place, sizeof x);
  return x;
}
inline Vector<float> load(const BFloat16* place) {
  constexpr int lanes = VectorOf<float>::lanes;
  typedef uint16_t Halves __attribute__((vector_size(lanes * 2)));
  typedef uint32_t Words __attribute__((vector_size(lanes * 4)));
  Halves halves;
  std::memcpy(&halves, place, sizeof halves);
  Words words = __builtin_convertvector(halves, Words) << 16;
  Vector<float> x;
  std::memcpy(&x, &words, sizeof x);
  return x;
}

template <typename A>
inline void store(A* place, Vector<A> x) {
  std::memcpy(place, &x, sizeof x);
}
#if defined(__AVX512BF16__)
inline void store(BFloat16* place, Vector<float> x) {
  const __m256bh halves = _mm512_cvtneps_pbh(__m512(x));
  std::memcpy(place, &halves, sizeof halves);
}
#else
inline void store(BFloat16* place, Vector<float> x) {
  for (int i = 0; i < VectorOf<float>::lanes; ++i) store(place + i, x[i]);
}
#endif

// place = x, of `count` elements.
template <typename U, typename A>
inline void store(U* place, const A* x, int64_t count) {
  constexpr int lanes = VectorOf<A>::lanes;
  int64_t i = 0;
  for (; i + lanes <= count; i += lanes) store(place + i, load(x + i));
  for (; i < count; ++i) store(place + i, x[i]);
}

// place += x, of `count` elements.
template <typename A>
inline void add(A* place, const A* x, int64_t count) {
  constexpr int lanes = VectorOf<A>::lanes;
  int64_t i = 0;
  for (; i + lanes <= count; i += lanes) store(place + i, load(place + i) + load(x + i));
  for (; i < count; ++i) place[i] += x[i];
}

// sum + a * b, rounded once. Scalar sums are written with it, as the compiler otherwise chooses for each
// loop whether products are rounded before they are added, and so a sum's bits by the number of rows.
template <typename A>
inline void add_product(A& sum, A a, A b) {
  sum = std::fma(a, b, sum);
}

// The sum of a vector's lanes: the upper half is added to the lower one until one lane is left.
template <typename A, int lanes = VectorOf<A>::lanes, typename V>
inline A total(V x) {
  if constexpr (lanes == 1) {
    return x[0];
  } else {
    typedef A Half __attribute__((vector_size(lanes / 2 * sizeof(A))));
    Half halves[2];
    std::memcpy(halves, &x, sizeof x);
    return total<A, lanes / 2>(Half(halves[0] + halves[1]));
  }
}

// The totals of four vectors, each with the bits of `total`.
template <typename A>
inline void totals(const Vector<A> (&x)[4], A (&out)[4]) {
  for (int i = 0; i < 4; ++i) out[i] = total<A>(x[i]);
}
#if defined(__AVX512F__)
inline void totals(const Vector<float> (&x)[4], float (&out)[4]) {
  __m512 pairs[2];
  for (int i = 0; i < 2; ++i) {  // the halves of two vectors side by side
    const __m512 a = __m512(x[2 * i]), b = __m512(x[2 * i + 1]);
    pairs[i] = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
  }
  __m512 sums = _mm512_add_ps(_mm512_shuffle_f32x4(pairs[0], pairs[1], 0x88),
                              _mm512_shuffle_f32x4(pairs[0], pairs[1], 0xdd));  // four lanes of each vector
  sums = _mm512_add_ps(sums, _mm512_permute_ps(sums, 0x4e));
  sums = _mm512_add_ps(sums, _mm512_permute_ps(sums, 0xb1));
  _mm_storeu_ps(out, _mm512_castps512_ps128(_mm512_maskz_compress_ps(0x1111, sums)));
}
#endif

}  // namespace
