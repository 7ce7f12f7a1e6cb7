// Products of bfloat16 in the processor's tile registers (Intel AMX), which multiply so fast that those of up to
// 32 rows take hardly longer than the weights need from memory.
//
// A tile has 16 rows of 64 bytes. One instruction adds 32 terms, in one order, to each of 16 outputs in each of
// 16 rows of x, so an output's bits do not depend on the number of rows. Weights are loaded as they lie in
// memory; x is transposed, as its tiles have pairs of inputs as rows. From WIDE rows on it is the other way round.
//
// Shapes: K inputs and O outputs of a product, M rows.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "team.h"
#include "vectors.h"
#if defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__)
#define HAS_TILES 1
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

#if !defined(HAS_TILES)
const bool has_tiles = false;
#else

constexpr int TILE = 16;               // rows of a tile, and its 32-bit columns
constexpr int TILE_WORDS = TILE * TILE;
constexpr int TILE_INPUTS = 2 * TILE;  // inputs of a tile of weights
constexpr int WIDE = 256;              // rows from which weights are transposed in place of x

// Whether the system lets this process use tiles, for which Linux has to be asked.
inline bool may_use_tiles() {
  constexpr long REQUEST = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
}
const bool has_tiles = may_use_tiles();

// The compiler's tile intrinsics do not say that they read and write memory.
inline void finish_writes() { asm volatile("" ::: "memory"); }

// Configures a thread's tiles for as long as it lives: 4 and 5 for weights, (16 outputs, 32 inputs), 6 and 7 for
// x, (16 pairs of inputs, columns), and 0 to 3 for sums, (16 outputs, columns).
class Tiles {
 public:
  explicit Tiles(int columns) {
    struct alignas(64) {
      uint8_t palette = 1, start = 0, reserved[14] = {};
      uint16_t bytes[16] = {};  // of a tile's row
      uint8_t rows[16] = {};
    } shape;
    for (int tile = 0; tile < 8; ++tile) {
      const bool is_weights = tile == 4 || tile == 5;
      shape.rows[tile] = TILE, shape.bytes[tile] = 4 * (is_weights ? TILE : columns);
    }
    finish_writes();
    _tile_loadconfig(&shape);
  }
  ~Tiles() { _tile_release(); }
};

// x = x^T, of 16 rows of 16 words each.
inline void transpose(__m512i (&x)[TILE]) {
  __m512i pairs[TILE], fours[TILE];
  for (int i = 0; i < TILE; i += 2) {
    pairs[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
    pairs[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
  }
  for (int i = 0; i < TILE; i += 4)
    for (int half = 0; half < 2; ++half) {
      fours[i + 2 * half] = _mm512_unpacklo_epi64(pairs[i + half], pairs[i + half + 2]);
      fours[i + 2 * half + 1] = _mm512_unpackhi_epi64(pairs[i + half], pairs[i + half + 2]);
    }
  for (int i = 0; i < 4; ++i) {  // lane j of fours[4 * k + i] has word 4 * j + i of rows 4 * k to 4 * k + 3
    const __m512i low[2] = {_mm512_shuffle_i32x4(fours[i], fours[4 + i], 0x44),
                            _mm512_shuffle_i32x4(fours[8 + i], fours[12 + i], 0x44)};
    const __m512i high[2] = {_mm512_shuffle_i32x4(fours[i], fours[4 + i], 0xee),
                             _mm512_shuffle_i32x4(fours[8 + i], fours[12 + i], 0xee)};
    x[i] = _mm512_shuffle_i32x4(low[0], low[1], 0x88);
    x[4 + i] = _mm512_shuffle_i32x4(low[0], low[1], 0xdd);
    x[8 + i] = _mm512_shuffle_i32x4(high[0], high[1], 0x88);
    x[12 + i] = _mm512_shuffle_i32x4(high[0], high[1], 0xdd);
  }
}

// out = x^T, of 16 rows of x with `columns` numbers each; further rows of `out` are 0.
inline void transpose(const float* x, int columns, float* out) {
  const __mmask16 filled = (1u << columns) - 1;
  __m512i rows[TILE];
  for (int i = 0; i < TILE; ++i) rows[i] = _mm512_maskz_loadu_epi32(filled, x + i * columns);
  transpose(rows);
  for (int i = 0; i < TILE; ++i) _mm512_store_si512(out + i * TILE, rows[i]);
}

// Memory of a thread for some words, aligned to vectors. `which`: one of several such places.
template <int which>
inline uint32_t* scratch(size_t words) {
  static thread_local std::vector<uint32_t> memory;
  if (memory.size() < words + TILE) memory.resize(words + TILE);
  return reinterpret_cast<uint32_t*>((reinterpret_cast<uintptr_t>(memory.data()) + 63) & ~uintptr_t(63));
}

// Tiles of x_MK: (M / 16, K / 32, 16 pairs of inputs, columns), with zeros past M and K. One row is its own.
inline const uint32_t* pack_rows(const BFloat16* x, int M, int64_t K, int columns) {
  const int64_t steps = (K + TILE_INPUTS - 1) / TILE_INPUTS;
  if (M == 1) {
    if (K % TILE_INPUTS == 0) return reinterpret_cast<const uint32_t*>(x);
    uint32_t* row = scratch<0>(steps * TILE);
    std::memset(row, 0, steps * TILE * sizeof *row);
    std::memcpy(row, x, K * sizeof *x);
    return row;
  }
  const __mmask16 filled = (1u << columns) - 1;
  uint32_t* packed = scratch<0>((M + TILE - 1) / TILE * steps * TILE * columns);
  uint32_t* next = packed;
  for (int row = 0; row < M; row += TILE)
    for (int64_t step = 0; step < steps; ++step, next += TILE * columns) {
      const int64_t left = K - step * TILE_INPUTS;
      const __mmask32 inputs = left >= TILE_INPUTS ? ~__mmask32(0) : (__mmask32(1) << left) - 1;
      __m512i rows[TILE];
      for (int i = 0; i < TILE; ++i)
        rows[i] = row + i < M ? _mm512_maskz_loadu_epi16(inputs, x + (row + i) * K + step * TILE_INPUTS)
                              : _mm512_setzero_si512();
      transpose(rows);
      for (int i = 0; i < TILE; ++i) _mm512_mask_storeu_epi32(next + i * columns, filled, rows[i]);
    }
  return packed;
}

// 16 rows of weights of a product: as they lie in memory, or copied with zeros where a tile would reach
// beyond their inputs or their number.
struct TileWeights {
  const BFloat16* place;
  int64_t stride;  // elements from row to row
};
template <int which>
inline TileWeights tile_weights(const BFloat16* weight, int count, int64_t K) {
  if (count == TILE && K % TILE_INPUTS == 0) return {weight, K};
  const int64_t padded = (K + TILE_INPUTS - 1) / TILE_INPUTS * TILE_INPUTS;
  auto* copy = reinterpret_cast<BFloat16*>(scratch<which>(TILE * padded / 2));
  std::memset(copy, 0, TILE * padded * sizeof *copy);
  for (int i = 0; i < count; ++i) std::memcpy(copy + i * padded, weight + i * K, K * sizeof *copy);
  return {copy, padded};
}

// Writes the sums of 16 pairs of outputs in 16 rows of x, or with `two` in 32: (half of the rows, half of the
// pairs, 16 outputs, columns). x: the first of the packed tiles. `ahead`: the first and second weights of the
// thread's next piece, (16, K) each, which are fetched meanwhile, or null.
template <bool two>
inline void multiply_tiles(TileWeights first, TileWeights second, int64_t steps, const uint32_t* x, int columns,
                           const BFloat16* const (&ahead)[2], float* sums) {
  const int words = TILE * columns;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t step = 0; step < steps; ++step) {
    const int64_t k = step * TILE_INPUTS;
    _tile_loadd(6, x + step * words, 4 * columns);
    _tile_loadd(4, first.place + k, 2 * first.stride);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(5, second.place + k, 2 * second.stride);
    _tile_dpbf16ps(1, 5, 6);
    if constexpr (two) {
      _tile_loadd(7, x + (steps + step) * words, 4 * columns);
      _tile_dpbf16ps(2, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
    }
    for (const BFloat16* weights : ahead)
      if (weights != nullptr)
        for (int line = 0; line < TILE; ++line)
          __builtin_prefetch(weights + (step * TILE + line) * TILE_INPUTS, 0, 2);  // into the second cache
  }
  _tile_stored(0, sums, 4 * columns);
  _tile_stored(1, sums + words, 4 * columns);
  if constexpr (two) {
    _tile_stored(2, sums + 2 * words, 4 * columns);
    _tile_stored(3, sums + 3 * words, 4 * columns);
  }
  finish_writes();
}

// product_pairs of bfloat16 (products.h) for many rows of x, which stay as they lie in memory, while each piece of
// weights is transposed once. Each sum has the terms and the order of `tile_pairs`.
template <typename Emit>
inline void wide_tile_pairs(const BFloat16* first, const BFloat16* second, int64_t pairs, int64_t K,
                            const BFloat16* x, int M, Pieces& pieces, const Emit& emit) {
  const int64_t steps = K / TILE_INPUTS;
  uint32_t* packed = scratch<0>(2 * steps * TILE_WORDS);  // (K / 32, half of the pairs, 16 pairs of inputs, 16 outputs)
  const Tiles tiles(TILE);
  alignas(64) float low[2 * TILE_WORDS], high[2 * TILE_WORDS];
  int64_t ahead = pieces.take();  // as in tile_pairs, so that its weights can be fetched
  for (int64_t piece = ahead; piece * TILE < pairs; piece = ahead) {
    ahead = pieces.take();
    const int64_t begin = piece * TILE;
    const int count = int(std::min<int64_t>(TILE, pairs - begin));
    uint32_t* next = packed;
    for (int64_t k = 0; k < K; k += TILE_INPUTS)
      for (const BFloat16* half : {first, second}) {
        __m512i rows[TILE];
        for (int i = 0; i < TILE; ++i)
          rows[i] = i < count ? _mm512_loadu_si512(half + (begin + i) * K + k) : _mm512_setzero_si512();
        transpose(rows);
        for (int i = 0; i < TILE; ++i, next += TILE) _mm512_store_si512(next, rows[i]);
      }
    for (int row = 0; row < M; row += 2 * TILE) {
      const int start = std::min(row, M - 2 * TILE);  // the last tiles may compute some rows again
      const BFloat16* inputs = x + start * K;
      const uint32_t* weights = packed;
      finish_writes();
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
      for (int64_t step = 0; step < steps; ++step, inputs += TILE_INPUTS, weights += 2 * TILE_WORDS) {
        _tile_loadd(4, inputs, 2 * K);
        _tile_loadd(6, weights, 4 * TILE);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, weights + TILE_WORDS, 4 * TILE);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, inputs + TILE * K, 2 * K);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
        if (row == 0 && (ahead + 1) * TILE <= pairs)
          for (int line = 0; line < TILE; ++line)
            for (const BFloat16* half : {first, second})
              __builtin_prefetch(half + ahead * TILE * K + (step * TILE + line) * TILE_INPUTS, 0, 2);
      }
      _tile_stored(0, low, 4 * TILE);
      _tile_stored(1, high, 4 * TILE);
      _tile_stored(2, low + TILE_WORDS, 4 * TILE);
      _tile_stored(3, high + TILE_WORDS, 4 * TILE);
      finish_writes();
      for (int i = row - start; i < 2 * TILE; ++i)
        emit(start + i, begin, count, low + i * TILE, high + i * TILE);
    }
  }
}

// product_pairs of bfloat16 for any number of rows.
template <typename Emit>
inline void tile_pairs(const BFloat16* first, const BFloat16* second, int64_t pairs, int64_t K, const BFloat16* x,
                       int M, Pieces& pieces, const Emit& emit) {
  if (M >= WIDE && K % TILE_INPUTS == 0) return wide_tile_pairs(first, second, pairs, K, x, M, pieces, emit);
  const int columns = M > 8 ? TILE : M > 4 ? 8 : M > 2 ? 4 : M, words = TILE * columns;  // fewer are faster
  const int64_t steps = (K + TILE_INPUTS - 1) / TILE_INPUTS;
  const uint32_t* packed = pack_rows(x, M, K, columns);
  const Tiles tiles(columns);
  alignas(64) float sums[4 * TILE_WORDS], outputs[2][TILE_WORDS];
  int64_t next = pieces.take();  // is taken before the piece ahead of it is computed, so that it can be fetched
  for (int64_t piece = next; piece * TILE < pairs; piece = next) {
    next = pieces.take();
    const int64_t begin = piece * TILE;
    const int count = int(std::min<int64_t>(TILE, pairs - begin));
    const TileWeights low = tile_weights<1>(first + begin * K, count, K);
    const TileWeights high = tile_weights<2>(second + begin * K, count, K);
    const bool more = (next + 1) * TILE <= pairs;
    const int64_t after = next * TILE * K;
    const BFloat16* ahead[2] = {more ? first + after : nullptr, more ? second + after : nullptr};
    for (int row = 0; row < M; row += 2 * TILE) {
      finish_writes();
      const uint32_t* here = packed + row * steps * TILE;
      if (M - row > TILE)
        multiply_tiles<true>(low, high, steps, here, columns, ahead, sums);
      else
        multiply_tiles<false>(low, high, steps, here, columns, ahead, sums);
      ahead[0] = ahead[1] = nullptr;
      if (columns == 1) {
        emit(0, begin, count, sums, sums + TILE);
        continue;
      }
      for (int part = 0; part < 2 && row + part * TILE < M; ++part) {
        for (int half = 0; half < 2; ++half) transpose(sums + (2 * part + half) * words, columns, outputs[half]);
        const int rows = std::min(TILE, M - row - part * TILE);
        for (int i = 0; i < rows; ++i)
          emit(row + part * TILE + i, begin, count, outputs[0] + i * TILE, outputs[1] + i * TILE);
      }
    }
  }
}

#endif

}  // namespace
