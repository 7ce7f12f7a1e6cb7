// Choices from the logits of one distribution, with the random numbers of decoding/sampling/noise.py.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "functions.h"
#include "structures.h"
#include "vectors.h"

namespace {

// The first of the largest numbers, or the first NaN.
template <typename A>
int64_t argmax(const A* x, int64_t count) {
  constexpr int lanes = VectorOf<A>::lanes;
  const A lowest = -std::numeric_limits<A>::infinity();
  Vector<A> most = Vector<A>{} + lowest;
  auto is_nan = most != most;
  int64_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    const Vector<A> next = load(x + i);
    most = next > most ? next : most;
    is_nan |= next != next;
  }
  A largest = lowest;
  bool has_nan = false;
  for (int lane = 0; lane < lanes; ++lane) largest = std::max(largest, most[lane]), has_nan |= is_nan[lane] != 0;
  for (; i < count; ++i) largest = std::max(largest, x[i]), has_nan |= x[i] != x[i];
  for (i = 0; i < count && (has_nan ? x[i] == x[i] : x[i] != largest);) ++i;
  return i;
}

template <typename A>
void divide(A* x, int64_t count, A by) {
  constexpr int lanes = VectorOf<A>::lanes;
  int64_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    const Vector<A> quotients = load(x + i) / by;
    std::memcpy(x + i, &quotients, sizeof quotients);
  }
  for (; i < count; ++i) x[i] /= by;
}

// Makes logits probabilities; `best` is the place of the largest.
template <typename A>
void softmax(A* logits, int64_t count, int64_t best, A temperature) {
  if (temperature != 1) divide(logits, count, temperature);
  divide(logits, count, exponentials(logits, count, logits[best]));
}

enum Purpose { DRAFT, ACCEPT, RESIDUAL, BONUS };

constexpr uint64_t MIX_1 = 0xBF58476D1CE4E5B9, MIX_2 = 0x94D049BB133111EB;
constexpr double SIGNED_STEP = 0x1p-64 * (1 - 0x1p-52);
uint64_t mix(uint64_t z) {
  z = (z ^ (z >> 30)) * MIX_1;
  z = (z ^ (z >> 27)) * MIX_2;
  return z ^ (z >> 31);
}
constexpr uint64_t GOLDEN = 0x9E3779B97F4A7C15;

// `uniforms` of decoding/sampling/noise.py. D: a double or a vector of them, I: as many signed integers.
template <typename D, typename I, typename Z>
D uniform_of(Z z) {
  z = (z ^ (z >> 30)) * MIX_1;
  z = (z ^ (z >> 27)) * MIX_2;
  if constexpr (std::is_same_v<D, double>)
    return I(z) * SIGNED_STEP + 0.5;
  else
    return __builtin_convertvector(I(z), D) * SIGNED_STEP + 0.5;
}

uint64_t extend(uint64_t state, uint64_t part) { return mix((state ^ part) * 5 + GOLDEN); }

// The token whose logit / temperature, plus Gumbel noise shared by draft and target, is the largest, as `race`
// of decoding/sampling/token_chooser.py chooses: that of the largest weight / E, where E = -log(u). The logits
// become weights; `best` is the place of the largest, and ids are their tokens (null: their places).
//
// As -log(u) > 1 - u, only a token whose weight / (1 - u) exceeds the most so far needs the logarithm. Four
// vectors of tokens are compared at once.
template <typename A>
int64_t race(A* logits, int64_t count, const int64_t* ids, int64_t best, uint64_t key, A temperature) {
  constexpr int lanes = VECTOR_BYTES / 8, vectors = 4;
  typedef uint64_t Words __attribute__((vector_size(VECTOR_BYTES)));
  typedef int64_t Integers __attribute__((vector_size(VECTOR_BYTES)));
  typedef A Weights __attribute__((vector_size(lanes * sizeof(A))));
  if (temperature != 1) divide(logits, count, temperature);
  exponentials(logits, count, logits[best]);
  int64_t winner = best;  // for NaN, its place
  A most = -1;
  const auto enter = [&](int64_t i, double u) {
    const A score = logits[i] / A(float(-std::log(u)));
    if (score > most) most = score, winner = i;
  };
  Words next;
  for (int i = 0; i < lanes; ++i) next[i] = (i + 1) * GOLDEN + key;
  int64_t i = 0;
  for (; i + vectors * lanes <= count; i += vectors * lanes) {
    const double bound = double(most) * (1 - 1e-6);  // rounding costs less
    Vector<double> u[vectors];
    Integers may_win = {};
    for (int k = 0; k < vectors; ++k) {
      Words z = next;
      if (ids != nullptr) std::memcpy(&z, ids + i + k * lanes, sizeof z), z = (z + 1) * GOLDEN + key;
      next += lanes * GOLDEN;
      u[k] = uniform_of<Vector<double>, Integers>(z);
      Weights weights;
      std::memcpy(&weights, logits + i + k * lanes, sizeof weights);
      may_win |= __builtin_convertvector(weights, Vector<double>) > (1 - u[k]) * bound;
    }
    int64_t any = 0;
    for (int lane = 0; lane < lanes; ++lane) any |= may_win[lane];
    if (any == 0) continue;
    for (int k = 0; k < vectors * lanes; ++k)
      if (logits[i + k] > (1 - u[k / lanes][k % lanes]) * bound) enter(i + k, u[k / lanes][k % lanes]);
  }
  for (; i < count; ++i)
    enter(i, uniform_of<double, int64_t>(((ids == nullptr ? i : ids[i]) + 1) * GOLDEN + key));
  return winner;
}

double uniform(const Draws& draws, int b, int depth, Purpose purpose) {
  const uint64_t key = extend(extend(draws.keys[b], draws.positions[b] + depth), purpose);
  return (mix(key + GOLDEN) >> 12) * 0x1p-52 + 0x1p-53;
}

// The first index up to which the weights add up to more than `share` of their total. Blocks are added first,
// as one running sum would wait for every addition.
template <typename A>
int64_t draw(const A* weights, int64_t count, double share) {
  constexpr int64_t BLOCK = 256, CHAINS = 8;
  const int64_t blocks = (count + BLOCK - 1) / BLOCK;
  std::vector<double> sums(blocks);
  double total = 0, before = 0;
  for (int64_t block = 0; block < blocks; ++block) {
    double parts[CHAINS] = {};
    const int64_t end = std::min((block + 1) * BLOCK, count);
    int64_t i = block * BLOCK;
    for (; i + CHAINS <= end; i += CHAINS)
      for (int chain = 0; chain < CHAINS; ++chain) parts[chain] += weights[i + chain];
    for (; i < end; ++i) parts[0] += weights[i];
    for (const double part : parts) sums[block] += part;
    total += sums[block];
  }
  const double point = share * total;
  int64_t block = 0;
  while (block + 1 < blocks && before + sums[block] <= point) before += sums[block++];
  int64_t chosen = block * BLOCK;  // for NaN, the block's first
  for (int64_t i = chosen; i < std::min((block + 1) * BLOCK, count); ++i) {
    if (!(weights[i] > 0)) continue;
    chosen = i;  // past the last one, where the two sums of a block are rounded differently
    if ((before += weights[i]) > point) break;
  }
  return chosen;
}

}  // namespace
