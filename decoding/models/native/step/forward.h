// A forward over new tokens by a team of threads, from the embedding to the logits.
//
// Shapes: those of structures.h, and M = B * N.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <type_traits>
#include <vector>

#include "attention.h"
#include "functions.h"
#include "products.h"
#include "prompt_attention.h"
#include "structures.h"
#include "team.h"
#include "vectors.h"

namespace {

template <typename T>
class Step {
  using A = Sum<T>;

 public:
  Step(const Model& model, const Forward& forward, Team& team, std::vector<char>& memory)
      : m_(model), f_(forward), team_(team), M_(forward.B * forward.N) {
    int64_t longest = 0;
    for (int b = 0; b < f_.B; ++b) longest = std::max(longest, f_.lengths[b]);
    scores_ = longest + f_.grown + f_.N;
    normed_ = int64_t(M_) * m_.C;
    if (m_.layers > 0 && m_.layer[0].state_norm != nullptr) normed_ = 2 * normed_ + m_.C;
    const int64_t per_thread = normed_ + MOST_HEADS * (scores_ + 2 * m_.D);
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
    if (f_.reads_prompts && attends_in_tiles()) find_runs();
  }

  static void run(void* self, int rank) { static_cast<Step*>(self)->thread(rank); }

 private:
  void thread(int rank) {
    Input<T>* normed = reinterpret_cast<Input<T>*>(own_ + (shares_norms() ? 0 : rank * own_size_));
    A* memory = own_ + rank * own_size_ + normed_;
    Pieces* pieces = pieces_.get();
    for (int row; (row = pieces->take()) < M_;) {
      const T* input = f_.states == nullptr ? static_cast<const T*>(m_.embedding) + f_.tokens[row] * m_.C
                                            : static_cast<const T*>(f_.states) + int64_t(row) * m_.C;
      for (int c = 0; c < m_.C; ++c) x_[row * m_.C + c] = widen(input[c]);
      tap(0, row);
    }
    ++pieces;
    team_.barrier();
    for (int i = 0; i < m_.layers; ++i) {
      const Layer& layer = m_.layer[i];
      if (layer.attends) attention(layer, rank, normed, memory, pieces);
      if (layer.feeds) feed_forward(layer, rank, normed, pieces + 4);
      pieces += 6;
      if (i + 1 < m_.layers && f_.columns[i + 1] >= 0)  // after the last layer the norm comes first
        for (int row = rank; row < M_; row += team_.size()) tap(i + 1, row);
    }
    norm_all(m_.norm, rank, normed);
    if (f_.columns[m_.layers] >= 0)
      for (int row = rank; row < M_; row += team_.size())
        f_.before_norm ? tap(m_.layers, row) : save(normed + row * m_.C, m_.layers, row);
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

  // The rows of prompts, which are many, are shared. Few rows are normed by every thread for itself, instead of a barrier.
  bool shares_norms() const { return f_.reads_prompts; }
  void norm_all(const void* weight, int rank, Input<T>* normed) {
    const int step = shares_norms() ? team_.size() : 1;
    for (int row = shares_norms() ? rank : 0; row < M_; row += step)
      rms_norm(x_ + row * m_.C, static_cast<const T*>(weight), m_.C, m_.eps, normed + row * m_.C);
    if (shares_norms()) team_.barrier();
  }

  // The embeddings of the tokens and the states, each normed, side by side.
  void norm_both(const Layer& layer, Input<T>* normed) {
    const int64_t C = m_.C;
    A* embedded = reinterpret_cast<A*>(normed) + 2 * M_ * C;
    for (int row = 0; row < M_; ++row, normed += 2 * C) {
      const T* token = static_cast<const T*>(m_.embedding) + f_.tokens[row] * C;
      for (int c = 0; c < C; ++c) embedded[c] = widen(token[c]);
      rms_norm(embedded, static_cast<const T*>(layer.attention_norm), C, m_.eps, normed);
      rms_norm(x_ + row * C, static_cast<const T*>(layer.state_norm), C, m_.eps, normed + C);
    }
  }

  // x += weight @ inputs
  void add_product(const void* weight, const void* bias, int64_t K, const Input<T>* inputs, Pieces& pieces) {
    product(static_cast<const T*>(weight), static_cast<const T*>(bias), m_.C, K, inputs, M_, pieces,
            [&](int row, int64_t output, int count, const A* values) {
              add(x_ + row * int64_t(m_.C) + output, values, count);
            });
  }

  void attention(const Layer& layer, int rank, Input<T>* normed, A* memory, Pieces* pieces) {
    const int heads = m_.Q + 2 * m_.H, D = m_.D;
    const bool joins = layer.state_norm != nullptr;
    joins ? norm_both(layer, normed) : norm_all(layer.attention_norm, rank, normed);
    product(static_cast<const T*>(layer.qkv), static_cast<const T*>(layer.qkv_bias), int64_t(heads) * D, m_.C * (1 + joins),
            normed, M_, pieces[0],
            [&](int row, int64_t output, int count, const A* values) {
              store(qkv_ + row * int64_t(heads) * D + output, values, count);
            });
    team_.barrier();
    for (int item; (item = pieces[1].take()) < M_ * heads;) place_head(layer, item / heads, item % heads);
    team_.barrier();
    if (!runs_.empty())
      attend_runs(layer, pieces[2]);
    else
      share_heads(M_, pieces[2], [&](auto heads, int row, int first) {
        this->template attend<heads>(layer, row, first, memory);
      });
    team_.barrier();
    add_product(layer.out, layer.out_bias, int64_t(m_.Q) * D, attended_, pieces[3]);
    team_.barrier();
  }

  // The parent of a row's node, whose index counts the nodes that have grown before.
  int64_t parent(int b, int64_t node) const { return f_.parents[b * int64_t(f_.grown + f_.N) + node]; }

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
      rotate(x, cosines, sines, D);
    }
    if (head < m_.Q) return;
    const bool is_key = head < m_.Q + m_.H;
    T* cache = static_cast<T*>(is_key ? layer.keys : layer.values);
    const int h = head - m_.Q - (is_key ? 0 : m_.H);
    store(cache + ((cache_row(b) * m_.H + h) * m_.S + f_.lengths[b] + f_.grown + n) * D, x, D);
  }

  int64_t cache_row(int b) const { return f_.places == nullptr ? b : f_.places[b]; }

  int depth(int b, int n) const {
    if (f_.parents == nullptr) return n;
    int depth = 0;
    for (int64_t node = parent(b, f_.grown + n); node >= 0; node = parent(b, node)) ++depth;
    return depth;
  }

  // The attention of a row's query heads from `first` on, which share a key/value head. `memory`: this thread's.
  template <int heads>
  void attend(const Layer& layer, int row, int first, A* memory) {
    const int D = m_.D, b = row / f_.N, n = row % f_.N, h = first / (m_.Q / m_.H);
    const int64_t start = (cache_row(b) * m_.H + h) * m_.S * D, length = f_.lengths[b];
    const T* keys = static_cast<const T*>(layer.keys) + start;
    const T* values = static_cast<const T*>(layer.values) + start;
    A *scores = memory, *out = memory + heads * scores_;
    Input<T>* queries = reinterpret_cast<Input<T>*>(out + heads * D);
    const A* rotated = qkv_ + (int64_t(row) * (m_.Q + 2 * m_.H) + first) * D;
    store(queries, rotated, heads * D);
    const A scale = A(1) / std::sqrt(A(D));

    // the slots from 0 on that a chain or a block sees, or those of the committed tokens and then the node's ancestors
    const int64_t visible = length + (f_.sees_all ? f_.N : depth(b, n) + 1);
    const int64_t plain = f_.parents == nullptr ? visible : length;
    score_keys<heads>(keys, plain, queries, D, scores, scores_);
    for (int64_t place = plain; place < visible; ++place) {
      const T* key = keys + (length + ancestor(b, f_.grown + n, visible - 1 - place)) * D;
      score_keys<heads>(key, 1, queries, D, scores + place, scores_);
    }
    A sums[heads];
    for (int head = 0; head < heads; ++head) {
      A* row = scores + head * scores_;
      sums[head] = exponentials(row, visible, largest(row, visible), scale);
    }
    std::fill(out, out + heads * D, A(0));
    add_values<heads>(values, plain, scores, scores_, D, out);
    for (int64_t place = plain; place < visible; ++place) {
      const T* value = values + (length + ancestor(b, f_.grown + n, visible - 1 - place)) * D;
      add_values<heads>(value, 1, scores + place, scores_, D, out);
    }
    Input<T>* attended = attended_ + (int64_t(row) * m_.Q + first) * D;
    for (int head = 0; head < heads; ++head) {
      const A inverse = A(1) / sums[head];
      for (int d = 0; d < D; ++d) out[head * D + d] *= inverse;
    }
    store(attended, out, heads * D);
  }

  // Shares the heads of some items among the threads. Calls `function` with a number of heads that share keys and values,
  // at most MOST_HEADS, as a constant, with the item, and with the first of the heads.
  template <typename Function>
  void share_heads(int items, Pieces& pieces, const Function& function) {
    const int group = m_.Q / m_.H, parts = (group + MOST_HEADS - 1) / MOST_HEADS;
    for (int piece; (piece = pieces.take()) < items * m_.H * parts;) {
      const int item = piece / (m_.H * parts), rest = piece % (m_.H * parts), before = rest % parts * MOST_HEADS;
      with_heads(std::min(group - before, MOST_HEADS), item, rest / parts * group + before, function);
    }
  }
  template <int heads = MOST_HEADS, typename Function>
  void with_heads(int number, int item, int first, const Function& function) {
    if constexpr (heads > 1)
      if (number < heads) return with_heads<heads - 1>(number, item, first, function);
    function(std::integral_constant<int, heads>(), item, first);
  }

#if defined(HAS_TILES)
  bool attends_in_tiles() const { return has_tiles && std::is_same_v<T, BFloat16> && m_.D % TILE_INPUTS == 0; }

  void find_runs() {
    for (int row = 0; row < M_; ++row) {
      const int b = row / f_.N;
      const int64_t place = cache_row(b), position = f_.lengths[b] + row % f_.N;
      Run* last = runs_.empty() ? nullptr : &runs_.back();
      if (last != nullptr && last->count < TILE && last->place == place && last->position + last->count == position)
        ++last->count;
      else
        runs_.push_back({row, 1, place, position});
    }
  }

  void attend_runs(const Layer& layer, Pieces& pieces) {
    if constexpr (std::is_same_v<T, BFloat16>) {
      const Tiles tiles(TILE);
      const int64_t stride = int64_t(m_.Q + 2 * m_.H) * m_.D;
      share_heads(int(runs_.size()), pieces, [&](auto heads, int item, int first) {
        const Run& run = runs_[item];
        const int64_t start = (run.place * m_.H + first / (m_.Q / m_.H)) * m_.S * m_.D;
        attend_run<heads>(run, static_cast<const T*>(layer.keys) + start, static_cast<const T*>(layer.values) + start,
                          m_.D, qkv_ + run.row * stride + first * m_.D, stride,
                          attended_ + (int64_t(run.row) * m_.Q + first) * m_.D, int64_t(m_.Q) * m_.D);
      });
    }
  }
#else
  bool attends_in_tiles() const { return false; }
  void find_runs() {}
  void attend_runs(const Layer&, Pieces&) {}
#endif

  int64_t ancestor(int b, int64_t node, int64_t steps) const {
    for (; steps > 0; --steps) node = parent(b, node);
    return node;
  }

  void feed_forward(const Layer& layer, int rank, Input<T>* normed, Pieces* pieces) {
    const int64_t F = m_.F;
    norm_all(layer.mlp_norm, rank, normed);
    const T* gate = static_cast<const T*>(layer.gate_up);
    const T* bias = static_cast<const T*>(layer.gate_up_bias);
    product_pairs(gate, gate + F * m_.C, F, m_.C, normed, M_, pieces[0],
                  [&](int row, int64_t f, int count, A* gates, A* ups) {
                    if (bias != nullptr)
                      for (int i = 0; i < count; ++i) gates[i] += widen(bias[f + i]), ups[i] += widen(bias[F + f + i]);
                    activate(gates, ups);
                    store(active_ + row * F + f, gates, count);
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
  int64_t own_size_, normed_, scores_;
  std::unique_ptr<Pieces[]> pieces_;
  std::vector<Run> runs_;  // of prompts whose attention is computed in tiles
};

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
    const int64_t nodes = forward.grown + forward.N;
    if (forward.lengths[b] < 0 || forward.lengths[b] + nodes > model.S) return false;
    for (int n = 0; n < forward.N && forward.tokens != nullptr; ++n) {
      const int64_t token = forward.tokens[b * forward.N + n];
      if (token < 0 || token >= model.vocabulary) return false;
    }
    for (int64_t node = 0; node < nodes && forward.parents != nullptr; ++node)
      if (forward.parents[b * nodes + node] >= node) return false;
  }
  return true;
}

template <typename T>
void run_step(const Model& model, const Forward& forward) {
  Team& team = team_of(forward.threads);
  Step<T> step(model, forward, team, memory);
  team.run(Step<T>::run, &step);
}

}  // namespace
