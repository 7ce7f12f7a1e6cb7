// One forward of a Llama-family decoder over few new tokens, as one call: the `fused` execution of the
// native target on a CPU (decoding/models/native/fused.py builds, loads and calls this file).
//
// A decode step reads every weight once, so its time is bounded by the memory's bandwidth. Here a team of
// threads stays in one parallel region for the whole forward and meets at five barriers a layer.
//
// Each output is one dot product, whose terms are added in an order that does not depend on the number of
// rows, and each query adds its visible keys in the order of their positions. So a token's logits have
// the same bits whether it is decoded alone, in a batch, in a drafted chain or in a tree.
//
// Shapes: B rows, N new tokens, M = B * N, C hidden size, Q query heads, H key/value heads, D head size,
// F feed-forward size, S slots of the cache, V rows of the output layer, K inputs and O outputs of a product.

#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>
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
#endif

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

inline void pause() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

// The OpenMP runtime that PyTorch has loaded, by its calling convention for compiled parallel regions.
// A team of its threads cannot get in the way of PyTorch's own operations, whose waiting threads spin for
// milliseconds: on two cores, a team of other threads made forwards that follow them up to 1.6 times as long.
struct OpenMP {
  using Parallel = void (*)(void (*)(void*), void*, unsigned, unsigned);
  Parallel parallel = reinterpret_cast<Parallel>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
  int (*rank)() = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "omp_get_thread_num"));
  int (*size)() = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "omp_get_num_threads"));
  bool works() const { return parallel != nullptr && rank != nullptr && size != nullptr; }
};
const OpenMP open_mp;
const pid_t loaded_by = getpid();

// Threads that run one function at a time together, the calling thread among them: OpenMP's where there
// are such, else the team's own. They spin for a short time and then sleep or yield, so that on busy
// cores the thread that has work gets them.
class Team {
 public:
  explicit Team(int size) : size_(size), members_(size), process_(getpid()) {
    if (open_mp.works() && process_ == loaded_by) return;  // a forked copy lacks OpenMP's threads
    for (int rank = 1; rank < size; ++rank) workers_.emplace_back([this, rank] { work(rank); });
  }
  ~Team() {
    if (process_ != getpid()) {  // a forked copy has no such threads
      for (auto& worker : workers_) worker.detach();
      return;
    }
    function_ = nullptr;
    begin();
    for (auto& worker : workers_) worker.join();
  }
  bool fits(int size) const { return size == size_ && process_ == getpid(); }
  int size() const { return size_; }

  void run(void (*function)(void*, int), void* argument) {
    function_ = function;
    argument_ = argument;
    if (size_ > 1 && workers_.empty()) {
      open_mp.parallel(&Team::join, this, unsigned(size_), 0);
      return;
    }
    running_.store(size_ - 1, std::memory_order_relaxed);
    begin();
    function(argument, 0);
    for (int spins = 0; running_.load(std::memory_order_acquire) != 0; ++spins) idle(spins);
  }

  void barrier() {
    const uint32_t round = round_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == members_.load(std::memory_order_relaxed)) {
      arrived_.store(0, std::memory_order_relaxed);
      round_.store(round + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; round_.load(std::memory_order_acquire) == round; ++spins) idle(spins);
  }

 private:
  static constexpr int SPINS = 2000;  // some 50 microseconds: barriers wait less, an idle team sleeps

  static void idle(int spins) {
    if (spins < SPINS)
      pause();
    else
      std::this_thread::yield();
  }
  static void join(void* self) {
    Team& team = *static_cast<Team*>(self);
    team.members_.store(open_mp.size(), std::memory_order_relaxed);  // OpenMP may give fewer threads
    team.function_(team.argument_, open_mp.rank());
    team.barrier();  // OpenMP's own at the end of the region does not yield
  }
  void begin() {
    job_.fetch_add(1, std::memory_order_release);
    job_.notify_all();
  }
  void work(int rank) {
    uint32_t seen = 0;
    for (;;) {
      for (int spins = 0; spins < SPINS && job_.load(std::memory_order_acquire) == seen; ++spins) pause();
      job_.wait(seen, std::memory_order_acquire);
      ++seen;
      if (function_ == nullptr) return;
      function_(argument_, rank);
      running_.fetch_sub(1, std::memory_order_release);
    }
  }

  const int size_;
  std::atomic<int> members_;  // threads of the running region
  const pid_t process_;
  std::vector<std::thread> workers_;
  void (*function_)(void*, int) = nullptr;
  void* argument_ = nullptr;
  alignas(64) std::atomic<uint32_t> job_{0};
  alignas(64) std::atomic<int> running_{0};
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<uint32_t> round_{0};
};

// Work that the team shares: each thread takes the next piece until none is left, so a thread that the
// system delays leaves its pieces to the others.
class Pieces {
 public:
  int take() { return next_.fetch_add(1, std::memory_order_relaxed); }
  void reset() { next_.store(0, std::memory_order_relaxed); }

 private:
  alignas(64) std::atomic<int> next_{0};
};

// Products ------------------------------------------------------------------------------------------

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

// Element-wise functions -----------------------------------------------------------------------------

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

// scores = e^(scores - most); returns their sum. The order of its terms depends on their number alone.
inline double exponentials(double* scores, int64_t count, double most) {
  double sum = 0;
  for (int64_t i = 0; i < count; ++i) sum += scores[i] = exponential(scores[i] - most);
  return sum;
}

inline float exponentials(float* scores, int64_t count, float most) {
  constexpr int lanes = VectorOf<float>::lanes;
  Vector<float> sums = {};
  int64_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    const Vector<float> x = exponential(load(scores + i) - most);
    store(scores + i, x);
    sums += x;
  }
  float sum = total<float>(sums);
  for (; i < count; ++i) sum += scores[i] = exponential(scores[i] - most);
  return sum;
}

// Attention --------------------------------------------------------------------------------------------

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

// The model ------------------------------------------------------------------------------------------

extern "C" {

// All pointers of a layer are to contiguous arrays of the model's dtype; null where the layer has none.
struct Layer {
  const void* attention_norm;  // (C,)
  const void* qkv;             // (Q + 2 * H) * D outputs
  const void* qkv_bias;
  const void* head_norm;       // (Q + H, D)
  const void* out;             // C outputs
  const void* out_bias;
  const void* mlp_norm;        // (C,)
  const void* gate_up;         // 2 * F outputs
  const void* gate_up_bias;
  const void* down;            // C outputs
  const void* down_bias;
  void* keys;                  // (rows of the cache, H, S, D)
  void* values;
  int32_t attends;             // whether the attention runs
  int32_t feeds;               // whether the MLP runs
};

struct Model {
  int32_t dtype;  // 0 float32, 1 float64, 2 bfloat16
  int32_t layers, C, Q, H, D, F, V, S;
  int64_t vocabulary;  // rows of the embedding
  double eps;
  const Layer* layer;
  const void* embedding;  // (vocabulary, C)
  const void* norm;       // (C,)
  const void* head;       // V outputs
  const void* cosines;    // (S, D), in the type of the sums
  const void* sines;      // with the signs of rotate-half
};

struct Forward {
  int32_t B, N, taps, threads;
  const int64_t* tokens;   // (B, N)
  const int64_t* parents;  // (B, N), -1 for a root; null: a chain
  const int64_t* lengths;  // (B,) committed tokens
  const int32_t* columns;  // (layers + 1,) place of each layer's hidden states in `hidden`, or -1
  void* hidden;            // (B, N, taps * C) of the model's dtype
  void* logits;            // (B, N, V), in the type of the sums; null: not wanted
  const int32_t* nodes;    // (B,) the one node of each row whose logits are wanted, as (B, V); null: all nodes
};

// The random numbers of a round (decoding/sampling/noise.py), and the temperature at which they sample.
struct Draws {
  double temperature;        // 0: the largest logit, without random numbers
  const uint64_t* keys;      // (B,) of seed, request and round
  const int64_t* positions;  // (B,) of the round's first token
};

// Some steps of a chain after the tokens of a Forward, which wants no logits.
struct Chain {
  int32_t first, last;      // the steps to take, without the last
  int32_t width, choices;   // steps of the complete chain; the first outputs, from which tokens are chosen
  const int32_t* unseen;    // (B,) tokens of the Forward that each row keeps
  const int32_t* counts;    // (B,) drafted tokens of each row; all but the last are kept
  int64_t* lengths;         // (B,) committed tokens, those of the Forward; every step adds what it keeps
  const int64_t* ids;       // (V,) tokens of the outputs; null: their numbers
  const int64_t* tips;      // (B,)
  int64_t* drafted;         // (B, 1 + width) the tips and the drafted tokens, past a row's count any token
  double* confidences;      // (B,) probability of the last step's tokens; null: not wanted
  Draws draws;
  void* probabilities;      // (B, width, vocabulary) that tokens were sampled from, in the type of the sums
  int64_t vocabulary;       // tokens of these distributions
};

// The test of drafted chains against a target's logits.
struct Verification {
  int32_t dtype, B, N;     // of the logits; rows; drafted tokens of the longest chain
  int64_t V;
  const void* logits;      // (B, N + 1, V) at the tip and the drafted tokens
  const int64_t* drafted;  // (B, N)
  const int32_t* counts;   // (B,) drafted tokens of each row
  const void* q;           // (B, N, V) that the tokens were sampled from, in the type of the sums; null: point masses
  double lenience;         // factor of q in the tests
  Draws draws;
  int32_t* accepted;       // (B,)
  int64_t* emitted;        // (B, N + 1) the accepted tokens, and the one that follows them
  double largest[2];       // of the logits at these tokens, and of their q; NaN if any is NaN
};

}  // extern "C"

template <typename T>
class Step {
  using A = Sum<T>;

 public:
  Step(const Model& model, const Forward& forward, Team& team, std::vector<char>& memory)
      : m_(model), f_(forward), team_(team), M_(forward.B * forward.N) {
    int64_t longest = 0;
    for (int b = 0; b < f_.B; ++b) longest = std::max(longest, f_.lengths[b]);
    scores_ = longest + f_.N;
    const int64_t per_thread = int64_t(M_) * m_.C + m_.D + scores_;
    const int64_t shared = int64_t(M_) * (m_.C + (m_.Q + 2 * m_.H) * m_.D + m_.Q * m_.D + m_.F);
    const size_t bytes = (shared + per_thread * team.size()) * sizeof(A) + 64;
    if (memory.size() < bytes) memory.resize(bytes);
    A* next = reinterpret_cast<A*>((reinterpret_cast<uintptr_t>(memory.data()) + 63) & ~uintptr_t(63));
    const auto take = [&next](int64_t count) {
      A* place = next;
      next += count;
      return place;
    };
    x_ = take(int64_t(M_) * m_.C);
    qkv_ = take(int64_t(M_) * (m_.Q + 2 * m_.H) * m_.D);
    attended_ = reinterpret_cast<Input<T>*>(take(int64_t(M_) * m_.Q * m_.D));
    active_ = reinterpret_cast<Input<T>*>(take(int64_t(M_) * m_.F));
    own_ = take(per_thread * team.size());
    own_size_ = per_thread;
    pieces_ = std::make_unique<Pieces[]>(6 * m_.layers + 2);
  }

  static void run(void* self, int rank) { static_cast<Step*>(self)->thread(rank); }

 private:
  void thread(int rank) {
    Input<T>* normed = reinterpret_cast<Input<T>*>(own_ + rank * own_size_);
    A* scores = own_ + rank * own_size_ + int64_t(M_) * m_.C + m_.D;
    Pieces* pieces = pieces_.get();
    for (int row; (row = pieces->take()) < M_;) {
      const T* embedded = static_cast<const T*>(m_.embedding) + f_.tokens[row] * m_.C;
      for (int c = 0; c < m_.C; ++c) x_[row * m_.C + c] = widen(embedded[c]);
      tap(0, row);
    }
    ++pieces;
    team_.barrier();
    for (int i = 0; i < m_.layers; ++i) {
      const Layer& layer = m_.layer[i];
      if (layer.attends) attention(layer, normed, scores, pieces);
      if (layer.feeds) feed_forward(layer, normed, pieces + 4);
      pieces += 6;
      if (i + 1 < m_.layers && f_.columns[i + 1] >= 0)  // after the last layer the norm comes first
        for (int row = rank; row < M_; row += team_.size()) tap(i + 1, row);
    }
    for (int row = 0; row < M_; ++row)
      rms_norm(x_ + row * m_.C, static_cast<const T*>(m_.norm), m_.C, m_.eps, normed + row * m_.C);
    if (f_.columns[m_.layers] >= 0)
      for (int row = rank; row < M_; row += team_.size()) save(normed + row * m_.C, m_.layers, row);
    if (f_.logits == nullptr) return;
    if (f_.nodes != nullptr)
      for (int b = 0; b < f_.B; ++b) {
        const Input<T>* last = normed + (b * f_.N + f_.nodes[b]) * m_.C;
        std::copy(last, last + m_.C, normed + b * m_.C);
      }
    A* logits = static_cast<A*>(f_.logits);
    const int rows = f_.nodes == nullptr ? M_ : f_.B;
    product(static_cast<const T*>(m_.head), static_cast<const T*>(nullptr), m_.V, m_.C, normed, rows, *pieces,
            [&](int row, int64_t output, int count, const A* values) {
              std::copy(values, values + count, logits + row * int64_t(m_.V) + output);
            });
  }

  void tap(int layer, int row) {
    if (f_.columns[layer] >= 0) save(x_ + row * m_.C, layer, row);
  }
  template <typename U>
  void save(const U* state, int layer, int row) {
    T* place = static_cast<T*>(f_.hidden) + (int64_t(row) * f_.taps + f_.columns[layer]) * m_.C;
    for (int c = 0; c < m_.C; ++c) store(place + c, widen(state[c]));
  }

  void norm_all(const void* weight, Input<T>* normed) {  // every thread for itself, instead of a barrier
    for (int row = 0; row < M_; ++row)
      rms_norm(x_ + row * m_.C, static_cast<const T*>(weight), m_.C, m_.eps, normed + row * m_.C);
  }

  // x += weight @ inputs
  void add_product(const void* weight, const void* bias, int64_t K, const Input<T>* inputs, Pieces& pieces) {
    product(static_cast<const T*>(weight), static_cast<const T*>(bias), m_.C, K, inputs, M_, pieces,
            [&](int row, int64_t output, int count, const A* values) {
              A* x = x_ + row * int64_t(m_.C) + output;
              for (int i = 0; i < count; ++i) x[i] += values[i];
            });
  }

  void attention(const Layer& layer, Input<T>* normed, A* scores, Pieces* pieces) {
    const int heads = m_.Q + 2 * m_.H, D = m_.D;
    norm_all(layer.attention_norm, normed);
    product(static_cast<const T*>(layer.qkv), static_cast<const T*>(layer.qkv_bias), int64_t(heads) * D, m_.C,
            normed, M_, pieces[0],
            [&](int row, int64_t output, int count, const A* values) {
              std::copy(values, values + count, qkv_ + row * int64_t(heads) * D + output);
            });
    team_.barrier();
    for (int item; (item = pieces[1].take()) < M_ * heads;) place_head(layer, item / heads, item % heads);
    team_.barrier();
    for (int item; (item = pieces[2].take()) < M_ * m_.Q;) attend(layer, item / m_.Q, item % m_.Q, scores);
    team_.barrier();
    add_product(layer.out, layer.out_bias, int64_t(m_.Q) * D, attended_, pieces[3]);
    team_.barrier();
  }

  // Rotates a query or key by its position, and writes a key or value to the cache.
  void place_head(const Layer& layer, int row, int head) {
    const int D = m_.D, b = row / f_.N, n = row % f_.N;
    A* x = qkv_ + (int64_t(row) * (m_.Q + 2 * m_.H) + head) * D;
    if (head < m_.Q + m_.H) {
      if (layer.head_norm != nullptr)
        rms_norm(x, static_cast<const T*>(layer.head_norm) + head * D, D, m_.eps, x);
      const int64_t position = f_.lengths[b] + depth(b, n);
      const A* cosines = static_cast<const A*>(m_.cosines) + position * D;
      const A* sines = static_cast<const A*>(m_.sines) + position * D;
      for (int d = 0; d < D / 2; ++d) {
        const A low = x[d], high = x[d + D / 2];
        x[d] = low * cosines[d] + high * sines[d];
        x[d + D / 2] = high * cosines[d + D / 2] + low * sines[d + D / 2];
      }
    }
    if (head < m_.Q) return;
    const bool is_key = head < m_.Q + m_.H;
    T* cache = static_cast<T*>(is_key ? layer.keys : layer.values);
    const int h = head - m_.Q - (is_key ? 0 : m_.H);
    T* slot = cache + ((int64_t(b) * m_.H + h) * m_.S + f_.lengths[b] + n) * D;
    for (int d = 0; d < D; ++d) store(slot + d, x[d]);
  }

  int depth(int b, int n) const {
    if (f_.parents == nullptr) return n;
    int depth = 0;
    for (int64_t node = f_.parents[b * f_.N + n]; node >= 0; node = f_.parents[b * f_.N + node]) ++depth;
    return depth;
  }

  void attend(const Layer& layer, int row, int head, A* scores) {
    const int D = m_.D, b = row / f_.N, n = row % f_.N, h = head / (m_.Q / m_.H);
    const int64_t start = (int64_t(b) * m_.H + h) * m_.S * D, length = f_.lengths[b];
    const T* keys = static_cast<const T*>(layer.keys) + start;
    const T* values = static_cast<const T*>(layer.values) + start;
    const A* query = qkv_ + (int64_t(row) * (m_.Q + 2 * m_.H) + head) * D;
    A* out = scores - D;
    const A scale = A(1) / std::sqrt(A(D));

    // the slots from 0 on that a chain sees, or those of the committed tokens and then the node's ancestors
    const int64_t visible = length + depth(b, n) + 1, plain = f_.parents == nullptr ? visible : length;
    A most = score_keys(keys, plain, query, D, scale, scores);
    for (int64_t place = plain; place < visible; ++place) {
      const T* key = keys + (length + ancestor(b, n, visible - 1 - place)) * D;
      most = std::max(most, score_keys(key, 1, query, D, scale, scores + place));
    }
    const A sum = exponentials(scores, visible, most);
    std::fill(out, out + D, A(0));
    add_values(values, plain, scores, D, out);
    for (int64_t place = plain; place < visible; ++place)
      add_values(values + (length + ancestor(b, n, visible - 1 - place)) * D, 1, scores + place, D, out);
    const A inverse = A(1) / sum;
    Input<T>* attended = attended_ + (int64_t(row) * m_.Q + head) * D;
    for (int d = 0; d < D; ++d) store(attended + d, out[d] * inverse);
  }

  // The node `steps` above node n.
  int64_t ancestor(int b, int64_t n, int64_t steps) const {
    for (; steps > 0; --steps) n = f_.parents[b * f_.N + n];
    return n;
  }

  void feed_forward(const Layer& layer, Input<T>* normed, Pieces* pieces) {
    const int64_t F = m_.F;
    norm_all(layer.mlp_norm, normed);
    const T* gate = static_cast<const T*>(layer.gate_up);
    const T* bias = static_cast<const T*>(layer.gate_up_bias);
    product_pairs(gate, gate + F * m_.C, F, m_.C, normed, M_, pieces[0],
                  [&](int row, int64_t f, int count, A* gates, A* ups) {
                    if (bias != nullptr)
                      for (int i = 0; i < count; ++i) gates[i] += widen(bias[f + i]), ups[i] += widen(bias[F + f + i]);
                    activate(gates, ups);
                    for (int i = 0; i < count; ++i) store(active_ + row * F + f + i, gates[i]);
                  });
    team_.barrier();
    add_product(layer.down, layer.down_bias, F, active_, pieces[1]);
    team_.barrier();
  }

  const Model& m_;
  const Forward& f_;
  Team& team_;
  const int M_;
  A *x_, *qkv_, *own_;
  Input<T>*attended_, *active_;
  int64_t own_size_, scores_;
  std::unique_ptr<Pieces[]> pieces_;
};

struct Product {
  const void* weight;
  const void* bias;
  int64_t O, K;
  const void* x;
  void* out;
  int32_t M;
  Pieces pieces;
  std::vector<float> widened;
};

template <typename T>
void run_product(void* argument, int) {
  Product& p = *static_cast<Product*>(argument);
  using A = Sum<T>;
  const void* inputs = std::is_same_v<T, Input<T>> ? p.x : p.widened.data();
  const auto* x = static_cast<const Input<T>*>(inputs);
  T* out = static_cast<T*>(p.out);
  product(static_cast<const T*>(p.weight), static_cast<const T*>(p.bias), p.O, p.K, x, p.M, p.pieces,
          [&](int row, int64_t output, int count, const A* values) {
            for (int i = 0; i < count; ++i) store(out + row * p.O + output + i, values[i]);
          });
}

std::mutex one_call;
Team* the_team = nullptr;  // never freed at exit, when another thread may still be in a step
std::vector<char> memory;

Team& team_of(int threads) {
  if (the_team == nullptr || !the_team->fits(threads)) {
    delete the_team;
    the_team = new Team(threads);
  }
  return *the_team;
}

// Whether every token has an embedding, its slot exists, and every parent comes before its node.
bool is_valid(const Model& model, const Forward& forward) {
  for (int b = 0; b < forward.B; ++b) {
    if (forward.lengths[b] < 0 || forward.lengths[b] + forward.N > model.S) return false;
    for (int n = 0; n < forward.N; ++n) {
      const int64_t token = forward.tokens[b * forward.N + n];
      if (token < 0 || token >= model.vocabulary) return false;
      if (forward.parents != nullptr && forward.parents[b * forward.N + n] >= n) return false;
    }
  }
  return true;
}

template <typename T>
void run_step(const Model& model, const Forward& forward) {
  Team& team = team_of(forward.threads);
  Step<T> step(model, forward, team, memory);
  team.run(Step<T>::run, &step);
}

// Choices ------------------------------------------------------------------------------------------------

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

uint64_t mix(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
  return z ^ (z >> 31);
}
constexpr uint64_t GOLDEN = 0x9E3779B97F4A7C15;
uint64_t extend(uint64_t state, uint64_t part) { return mix((state ^ part) * 5 + GOLDEN); }

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

// Chooses the token of a row's step from its logits, which become probabilities where these are wanted.
template <typename A>
void choose(A* logits, const Chain& chain, int b, int step) {
  const int64_t place = int64_t(b) * chain.width + step, count = chain.choices;
  const bool samples = chain.draws.temperature > 0;
  int64_t chosen = argmax(logits, count);
  if (samples || chain.confidences != nullptr)
    softmax(logits, count, chosen, A(samples ? chain.draws.temperature : 1));
  if (samples) {
    chosen = draw(logits, count, uniform(chain.draws, b, step, DRAFT));
    A* probabilities = static_cast<A*>(chain.probabilities) + place * chain.vocabulary;
    std::fill(probabilities, probabilities + chain.vocabulary, A(0));
    for (int64_t i = 0; i < count; ++i) probabilities[chain.ids == nullptr ? i : chain.ids[i]] = logits[i];
  }
  if (chain.confidences != nullptr) chain.confidences[b] = logits[chosen];
  chain.drafted[place + b + 1] = chain.ids == nullptr ? chosen : chain.ids[chosen];
}

// Makes p the residual max(p - q, 0) after a token was rejected, unless p = q up to rounding. q: null for
// the point mass at this token.
template <typename A>
void reject(A* p, const A* q, int64_t count, int64_t drafted) {
  const auto left = [&](int64_t i) { return p[i] - (q == nullptr ? A(i == drafted) : q[i]); };
  bool is_left = false;
  for (int64_t i = 0; i < count; ++i) is_left |= left(i) > 0;
  for (int64_t i = 0; is_left && i < count; ++i) p[i] = std::max(left(i), A(0));
}

void watch(double& largest, double x) {  // keeps NaN
  if (largest == largest && !(x <= largest)) largest = x;
}

// Tests a row's drafted tokens one by one, as `greedy` and `token` of decoding/verification do.
template <typename T>
void verify_row(Verification& v, int b, Sum<T>* p) {
  using A = Sum<T>;
  const T* logits = static_cast<const T*>(v.logits) + int64_t(b) * (v.N + 1) * v.V;
  const A* q = static_cast<const A*>(v.q) + int64_t(b) * v.N * v.V;
  const bool samples = v.draws.temperature > 0;
  for (int n = 0;; ++n, logits += v.V, q += v.V) {
    for (int64_t i = 0; i < v.V; ++i) p[i] = widen(logits[i]);
    const int64_t best = argmax(p, v.V);
    watch(v.largest[0], p[best]);
    int64_t& emitted = v.emitted[int64_t(b) * (v.N + 1) + n];
    const bool drafts = n < v.counts[b];
    const int64_t drafted = drafts ? v.drafted[int64_t(b) * v.N + n] : -1;
    bool accepts = drafted == best;
    emitted = best;
    if (samples) {
      softmax(p, v.V, best, A(v.draws.temperature));
      if (drafts) {
        const double chance = v.q == nullptr ? 1 : q[drafted];
        watch(v.largest[1], chance);
        accepts = uniform(v.draws, b, n, ACCEPT) * (v.lenience * chance) < p[drafted];
        if (!accepts) reject(p, v.q == nullptr ? nullptr : q, v.V, drafted);
      }
      emitted = accepts ? drafted : draw(p, v.V, uniform(v.draws, b, n, drafts ? RESIDUAL : BONUS));
    }
    if (!accepts) {
      v.accepted[b] = n;
      return;
    }
  }
}

template <typename T>
void verify_rows(Verification& v) {
  std::vector<Sum<T>> p(v.V);
  for (int b = 0; b < v.B; ++b) verify_row<T>(v, b, p.data());
}

// Every step runs all rows, so its bits are those of a forward over the last drafted tokens. Returns false
// as soon as a step would lead out of the model's arrays.
template <typename T>
bool run_chain(const Model& model, Forward forward, const Chain& chain) {
  static std::vector<Sum<T>> logits;
  std::vector<int64_t> tokens(forward.B);
  std::vector<int32_t> last(forward.B);
  for (int b = 0; b < forward.B; ++b) last[b] = std::max(chain.unseen[b], 1) - 1;
  logits.resize(std::max(logits.size(), size_t(forward.B) * model.V));
  forward.logits = logits.data(), forward.nodes = last.data();
  for (int step = chain.first; step < chain.last; ++step) {
    if (step > 0) {
      for (int b = 0; b < forward.B; ++b) tokens[b] = chain.drafted[int64_t(b) * (chain.width + 1) + step];
      forward.N = 1, forward.tokens = tokens.data(), forward.nodes = nullptr;
    }
    if (!is_valid(model, forward)) return false;
    run_step<T>(model, forward);
    for (int b = 0; b < forward.B; ++b) {
      const int kept = step == 0 ? chain.unseen[b] : chain.counts[b] > step;
      choose(logits.data() + int64_t(b) * model.V, chain, b, step);
      chain.lengths[b] += kept;
      chain.drafted[int64_t(b) * (chain.width + 1)] = chain.tips[b];
    }
  }
  return true;
}

}  // namespace

// Returns 0, or 1 for tokens, lengths or parents that would lead out of the model's arrays.
extern "C" int32_t forward_step(const Model* model, const Forward* forward) {
  std::lock_guard<std::mutex> lock(one_call);
  if (!is_valid(*model, *forward)) return 1;
  if (model->dtype == 0) run_step<float>(*model, *forward);
  if (model->dtype == 1) run_step<double>(*model, *forward);
  if (model->dtype == 2) run_step<BFloat16>(*model, *forward);
  return 0;
}

// Drafts some tokens of a chain; returns as forward_step does.
extern "C" int32_t draft_chain(const Model* model, const Forward* forward, const Chain* chain) {
  std::lock_guard<std::mutex> lock(one_call);
  const auto run = model->dtype == 0 ? run_chain<float> : model->dtype == 1 ? run_chain<double> : run_chain<BFloat16>;
  return run(*model, *forward, *chain) ? 0 : 1;
}

// out_MO = x_MK @ weight_OK^T + bias_O, all of one dtype (as in Model).
extern "C" void linear(int32_t dtype, int32_t threads, int32_t M, int64_t O, int64_t K, const void* x,
                       const void* weight, const void* bias, void* out) {
  std::lock_guard<std::mutex> lock(one_call);
  Product p{weight, bias, O, K, x, out, M, {}, {}};
  if (dtype == 2 && !std::is_same_v<BFloat16, Input<BFloat16>>) {
    p.widened.resize(size_t(M) * K);
    for (int64_t i = 0; i < M * K; ++i) p.widened[i] = widen(static_cast<const BFloat16*>(x)[i]);
  }
  const auto function = dtype == 0 ? run_product<float> : dtype == 1 ? run_product<double> : run_product<BFloat16>;
  team_of(threads).run(function, &p);
}

// Tests drafted chains; returns as forward_step does, for drafted tokens outside the vocabulary.
extern "C" int32_t verify_chains(Verification* v) {
  for (int b = 0; b < v->B; ++b)
    for (int n = 0; n < v->counts[b]; ++n) {
      const int64_t token = v->drafted[int64_t(b) * v->N + n];
      if (token < 0 || token >= v->V) return 1;
    }
  if (v->dtype == 0) verify_rows<float>(*v);
  if (v->dtype == 1) verify_rows<double>(*v);
  if (v->dtype == 2) verify_rows<BFloat16>(*v);
  return 0;
}
