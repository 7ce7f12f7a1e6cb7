// The attention of a prompt's tokens in tile registers, 16 of them at a time.
//
// Scores and sums are transposed, with a lane for each token: a tile of 16 keys by 16 tokens, and later of 16
// dimensions by 16 tokens, so that keys are read as they lie in the cache and the softmax needs no sums over lanes.
// Every token adds its visible keys in the order of their positions, 32 at a time from the first on, and its bits
// depend neither on the tokens nor on the prompts beside it.
//
// Shapes: D head size, T tokens of a run, at most 16.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "functions.h"
#include "tiles.h"
#include "vectors.h"

namespace {

// Some tokens of one prompt that follow each other, at most 16.
struct Run {
  int row, count;    // the first token, among those of the forward, and their number
  int64_t place;     // row of the cache
  int64_t position;  // slot of the first token
};

#if defined(HAS_TILES)

// Writes a_16K @ b_KT of each head to `out`, (16, T) with T = 16. a: rows `stride` apart; b: packed tiles, `b_size` words
// from head to head; out: `out_size` numbers from head to head.
template <int heads>
inline void multiply_heads(const BFloat16* a, int64_t stride, int64_t steps, const uint32_t* b, int64_t b_size,
                           float* out, int64_t out_size) {
  finish_writes();
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t step = 0; step < steps; ++step, a += TILE_INPUTS, b += TILE_WORDS) {
    _tile_loadd(4, a, 2 * stride);
    _tile_loadd(6, b, 4 * TILE);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (heads > 1) {
      _tile_loadd(7, b + b_size, 4 * TILE);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (heads > 2) {
      _tile_loadd(6, b + 2 * b_size, 4 * TILE);
      _tile_dpbf16ps(2, 4, 6);
    }
    if constexpr (heads > 3) {
      _tile_loadd(7, b + 3 * b_size, 4 * TILE);
      _tile_dpbf16ps(3, 4, 7);
    }
  }
  _tile_stored(0, out, 4 * TILE);
  if constexpr (heads > 1) _tile_stored(1, out + out_size, 4 * TILE);
  if constexpr (heads > 2) _tile_stored(2, out + 2 * out_size, 4 * TILE);
  if constexpr (heads > 3) _tile_stored(3, out + 3 * out_size, 4 * TILE);
  finish_writes();
}

// Numbers of two rows as 16 words: each holds the lower row's in its lower half.
inline __m512i join_halves(__m256i low, __m256i high) {
  return _mm512_or_si512(_mm512_cvtepu16_epi32(low), _mm512_slli_epi32(_mm512_cvtepu16_epi32(high), 16));
}

// The transposed values, (D, count), of `end` keys; further ones are 0. count: a multiple of 32.
inline void transpose_values(const BFloat16* values, int64_t end, int64_t count, int D, BFloat16* out) {
  const __m256i none = _mm256_setzero_si256();
  for (int64_t key = 0; key < count; key += TILE_INPUTS)
    for (int d = 0; d < D; d += TILE) {
      const auto value = [&](int64_t i) {
        return i < end ? _mm256_loadu_si256(reinterpret_cast<const __m256i*>(values + i * D + d)) : none;
      };
      __m512i pairs[TILE];
      for (int i = 0; i < TILE; ++i) pairs[i] = join_halves(value(key + 2 * i), value(key + 2 * i + 1));
      transpose(pairs);
      for (int i = 0; i < TILE; ++i) _mm512_storeu_si512(out + (d + i) * count + key, pairs[i]);
    }
}

// Turns a head's scores, (keys, T), into packed tiles of their weights, (keys / 32, 16 pairs of keys, T), and returns
// the weights' sums. Weights are rounded to bfloat16 before they are added, so that they are divided by what they
// add up to. Tokens see the keys up to their `positions`.
inline __m512 weigh(const float* scores, int64_t keys, __m512i positions, float scale, uint32_t* packed) {
  __m512 most = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
  const auto sees = [&](int64_t key) { return _mm512_cmple_epi32_mask(_mm512_set1_epi32(int(key)), positions); };
  const int64_t end = _mm512_reduce_max_epi32(positions) + 1;
  for (int64_t key = 0; key < end; ++key)
    most = _mm512_mask_max_ps(most, sees(key), most, _mm512_loadu_ps(scores + key * TILE));
  __m512 sums = _mm512_setzero_ps();
  const auto weight = [&](int64_t key) {
    if (key >= end) return _mm256_setzero_si256();
    const Vector<float> score = Vector<float>(_mm512_loadu_ps(scores + key * TILE));
    const __m512 power = __m512(exponential((score - Vector<float>(most)) * scale));
    const __m256i rounded = __m256i(_mm512_cvtneps_pbh(_mm512_maskz_mov_ps(sees(key), power)));
    sums = _mm512_add_ps(sums, _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(rounded), 16)));
    return rounded;
  };
  for (int64_t key = 0; key < keys; key += 2, packed += TILE) {
    const __m256i low = weight(key);
    _mm512_storeu_si512(packed, join_halves(low, weight(key + 1)));
  }
  return sums;
}

// Writes the attention of a run's `heads` query heads, which share keys and values, to rows of `out`. keys, values: (slots,
// D) of the run's row; queries: rows of heads * D numbers. Both rows are a `stride` apart. D: a multiple of 32.
template <int heads>
inline void attend_run(const Run& run, const BFloat16* keys, const BFloat16* values, int D, const float* queries,
                       int64_t query_stride, BFloat16* out, int64_t out_stride) {
  const int64_t end = run.position + run.count, count = (end + TILE_INPUTS - 1) / TILE_INPUTS * TILE_INPUTS;
  auto* own = reinterpret_cast<BFloat16*>(scratch<3>(heads * TILE * D / 2));
  std::memset(own, 0, heads * TILE * D * sizeof *own);
  for (int i = 0; i < run.count; ++i)
    for (int head = 0; head < heads; ++head)
      store(own + (head * TILE + i) * D, queries + i * query_stride + head * D, D);
  const uint32_t* packed = pack_rows(own, heads * TILE, D, TILE);

  float* scores = reinterpret_cast<float*>(scratch<4>(heads * count * TILE));
  for (int64_t key = 0; key < end; key += TILE) {
    const TileWeights block = tile_weights<1>(keys + key * D, int(std::min<int64_t>(TILE, end - key)), D);
    multiply_heads<heads>(block.place, block.stride, D / TILE_INPUTS, packed, D * TILE / 2, scores + key * TILE,
                          count * TILE);
  }
  const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  const __m512i places = _mm512_add_epi32(lanes, _mm512_set1_epi32(int(run.position)));
  const __m512i positions = _mm512_min_epi32(places, _mm512_set1_epi32(int(end) - 1));
  uint32_t* weights = scratch<0>(heads * count * TILE / 2);  // the queries are no longer needed
  __m512 inverse[heads];
  for (int head = 0; head < heads; ++head) {
    const __m512 sums = weigh(scores + head * count * TILE, count, positions, 1 / std::sqrt(float(D)),
                              weights + head * count * TILE / 2);
    inverse[head] = _mm512_div_ps(_mm512_set1_ps(1), sums);
  }

  auto* transposed = reinterpret_cast<BFloat16*>(scratch<2>(count * D / 2));
  transpose_values(values, end, count, D, transposed);
  alignas(64) float sums[heads * TILE_WORDS];
  for (int d = 0; d < D; d += TILE) {
    multiply_heads<heads>(transposed + d * count, count, count / TILE_INPUTS, weights, count * TILE / 2, sums, TILE_WORDS);
    for (int head = 0; head < heads; ++head) {
      __m512i rows[TILE];
      for (int i = 0; i < TILE; ++i)
        rows[i] = __m512i(_mm512_mul_ps(_mm512_load_ps(sums + head * TILE_WORDS + i * TILE), inverse[head]));
      transpose(rows);
      for (int i = 0; i < run.count; ++i) store(out + i * out_stride + head * D + d, Vector<float>(rows[i]));
    }
  }
}

#endif

}  // namespace
