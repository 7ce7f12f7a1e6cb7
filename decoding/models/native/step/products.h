// Products of few rows with a matrix, in tiles of rows whose sums stay in registers.
//
// Shapes: K inputs and O outputs of a product, M rows.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "team.h"
#include "tiles.h"
#include "vectors.h"

namespace {

constexpr int PREFETCHED = 1024;  // bytes of each row of weights that are fetched before they are needed

// A step along the rows of weights and inputs: vectors of `elements` of each, multiplied into a sum.
template <typename T>
struct Multiply {
  using Part = Vector<Sum<T>>;
  static constexpr int elements = VectorOf<Sum<T>>::lanes;
  template <typename U>
  static Part part(const U* place) {
    return load(place);
  }
  static void add(Part& sum, Part a, Part b) { sum += a * b; }
};
#if defined(__AVX512BF16__)
template <>
struct Multiply<BFloat16> {
  using Part = __m512bh;
  static constexpr int elements = 32;
  static Part part(const BFloat16* place) {
    Part x;
    std::memcpy(&x, place, sizeof x);
    return x;
  }
  static void add(Vector<float>& sum, Part a, Part b) { sum = Vector<float>(_mm512_dpbf16_ps(__m512(sum), a, b)); }
};
#endif

// The dot products of each of MR rows of x with two rows of weights.
template <typename T, int MR>
inline void dots(const T* first, const T* second, int64_t K, const Input<T>* x, Sum<T> (&out)[MR][2]) {
  using A = Sum<T>;
  using Step = Multiply<T>;
  constexpr int AHEAD = PREFETCHED / sizeof(T), count = 2 * MR;
  Vector<A> sums[count] = {};
  int64_t k = 0;
  for (; k + Step::elements <= K; k += Step::elements) {
    __builtin_prefetch(first + k + AHEAD);
    __builtin_prefetch(second + k + AHEAD);
    const typename Step::Part weights[2] = {Step::part(first + k), Step::part(second + k)};
#pragma GCC unroll 16
    for (int m = 0; m < MR; ++m) {
      const typename Step::Part inputs = Step::part(x + m * K + k);
      Step::add(sums[2 * m], weights[0], inputs);
      Step::add(sums[2 * m + 1], weights[1], inputs);
    }
  }
  A* sum = &out[0][0];
  int i = 0;
#pragma GCC unroll 8
  for (; i + 4 <= count; i += 4)
    totals(reinterpret_cast<const Vector<A>(&)[4]>(sums[i]), reinterpret_cast<A(&)[4]>(sum[i]));
  for (; i < count; ++i) sum[i] = total<A>(sums[i]);
  for (; k < K; ++k)
    for (int m = 0; m < MR; ++m) {
      add_product(out[m][0], widen(first[k]), A(widen(x[m * K + k])));
      add_product(out[m][1], widen(second[k]), A(widen(x[m * K + k])));
    }
}

// Rows of a tile, whose sums fill the registers: 24 of AVX-512's 32, 12 of the others' 16.
constexpr int MOST_ROWS = VECTOR_BYTES == 64 ? 12 : 6;
constexpr int PIECE = 16;  // pairs of outputs of a piece of work
#if defined(HAS_TILES)
static_assert(PIECE == TILE);  // as `emit` takes the outputs of a tile too
#endif

// The outputs of a product come in pairs, one of its first and one of its second half, which for the gate
// and up matrices of an MLP are those that are multiplied. `emit(row, pair, count, first, second)` takes
// those of `count` pairs, in arrays of PIECE elements that it may change.
template <typename T, int MR, typename Emit>
inline void tile(const T* first, const T* second, int64_t K, const Input<T>* x, int row, int64_t begin,
                 int count, const Emit& emit) {
  Sum<T> low[MR][PIECE] = {}, high[MR][PIECE] = {};
  for (int i = 0; i < count; ++i) {
    Sum<T> out[MR][2];
    dots<T, MR>(first + (begin + i) * K, second + (begin + i) * K, K, x + row * K, out);
    for (int m = 0; m < MR; ++m) low[m][i] = out[m][0], high[m][i] = out[m][1];
  }
  for (int m = 0; m < MR; ++m) emit(row + m, begin, count, low[m], high[m]);
}

// Calls `tile` with the number of rows, at most MOST_ROWS, as a constant.
template <typename T, int MR = MOST_ROWS, typename... Arguments>
inline void tile_of(int rows, const Arguments&... arguments) {
  if constexpr (MR > 1)
    if (rows < MR) return tile_of<T, MR - 1>(rows, arguments...);
  tile<T, MR>(arguments...);
}

template <typename T, typename Emit>
inline void product_pairs(const T* first, const T* second, int64_t pairs, int64_t K, const Input<T>* x, int M,
                          Pieces& pieces, const Emit& emit) {
#if defined(HAS_TILES)
  if constexpr (std::is_same_v<T, BFloat16>)
    if (has_tiles) return tile_pairs(first, second, pairs, K, x, M, pieces, emit);
#endif
  for (int64_t piece; (piece = pieces.take()) * PIECE < pairs;) {
    const int64_t begin = piece * PIECE;
    const int count = int(std::min<int64_t>(PIECE, pairs - begin));
    for (int row = 0; row < M;) {
      const int left = M - row;
      // the last two tiles of equal size: 16 rows of at most 12 as 8 and 8, not as 12 and 4
      const int rows = left > MOST_ROWS && left < 2 * MOST_ROWS ? (left + 1) / 2 : std::min(left, MOST_ROWS);
      tile_of<T>(rows, first, second, K, x, row, begin, count, emit);
      row += rows;
    }
  }
}

// x_MK @ weight_OK^T + bias_O; `emit(row, output, count, values)` takes the outputs. The middle one of an odd
// number belongs to both halves.
template <typename T, typename Emit>
inline void product(const T* weight, const T* bias, int64_t O, int64_t K, const Input<T>* x, int M,
                    Pieces& pieces, const Emit& emit) {
  const int64_t half = (O + 1) / 2, second = O - half;
  const auto add = [&](int row, int64_t output, int count, Sum<T>* values) {
    if (bias != nullptr)
      for (int i = 0; i < count; ++i) values[i] += widen(bias[output + i]);
    emit(row, output, count, values);
  };
  product_pairs(weight, weight + second * K, half, K, x, M, pieces,
                [&](int row, int64_t pair, int count, Sum<T>* low, Sum<T>* high) {
                  const int twice = second + pair < half;  // whether the first of these is the middle one
                  add(row, pair, count, low);
                  add(row, second + pair + twice, count - twice, high + twice);
                });
}

}  // namespace
