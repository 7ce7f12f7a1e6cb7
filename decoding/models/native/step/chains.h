// Chains of drafted tokens: their draft, and their test by the logits of a target.
//
// Shapes: those of structures.h.

#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

#include "forward.h"
#include "sampling.h"
#include "structures.h"
#include "team.h"
#include "vectors.h"

namespace {

// Chooses the token of a row's step from its logits, which become probabilities where these are wanted.
template <typename A>
void choose(A* logits, const Chain& chain, int b, int step) {
  const int64_t place = int64_t(b) * chain.width + step, count = chain.choices;
  const bool races = chain.draws.shared != nullptr, samples = !races && chain.draws.temperature > 0;
  int64_t chosen = argmax(logits, count);
  if (races) {
    static std::vector<A> weights;
    weights.assign(logits, logits + count);
    const uint64_t key = chain.draws.shared[int64_t(b) * chain.draws.width + step];
    chosen = race(weights.data(), count, chain.ids, chosen, key, A(chain.draws.temperature));
  }
  if (samples || chain.confidences != nullptr)
    softmax(logits, count, races ? argmax(logits, count) : chosen, A(samples ? chain.draws.temperature : 1));
  if (samples) {
    chosen = draw(logits, count, uniform(chain.draws, b, step, DRAFT));
    A* probabilities = static_cast<A*>(chain.probabilities) + place * chain.vocabulary;
    std::fill(probabilities, probabilities + chain.vocabulary, A(0));
    for (int64_t i = 0; i < count; ++i) probabilities[chain.ids == nullptr ? i : chain.ids[i]] = logits[i];
  }
  if (chain.confidences != nullptr) chain.confidences[b] = logits[chosen];
  chain.drafted[place + b + 1] = chain.ids == nullptr ? chosen : chain.ids[chosen];
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

// Tests a row's drafted tokens one by one, as `greedy`, `token` and `coupled` of decoding/verification do.
template <typename T>
void verify_row(const Verification& v, int b, Sum<T>* p, std::array<double, 2>& largest) {
  using A = Sum<T>;
  const T* logits = static_cast<const T*>(v.logits) + int64_t(b) * (v.N + 1) * v.V;
  const A* q = static_cast<const A*>(v.q) + int64_t(b) * v.N * v.V;
  const bool races = v.draws.shared != nullptr, samples = !races && v.draws.temperature > 0;
  for (int n = 0;; ++n, logits += v.V, q += v.V) {
    for (int64_t i = 0; i < v.V; ++i) p[i] = widen(logits[i]);
    const int64_t best = argmax(p, v.V);
    watch(largest[0], p[best]);
    int64_t& emitted = v.emitted[int64_t(b) * (v.N + 1) + n];
    const bool drafts = n < v.counts[b];
    const int64_t drafted = drafts ? v.drafted[int64_t(b) * v.N + n] : -1;
    emitted = best;
    if (races) {
      const uint64_t key = v.draws.shared[int64_t(b) * v.draws.width + n];
      emitted = race(p, v.V, nullptr, best, key, A(v.draws.temperature));
    }
    bool accepts = drafted == emitted;
    if (samples) {
      softmax(p, v.V, best, A(v.draws.temperature));
      if (drafts) {
        const double chance = v.q == nullptr ? 1 : q[drafted];
        watch(largest[1], chance);
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

struct Rows {
  Verification& verification;
  std::vector<std::array<double, 2>> largest;  // of each row
  Pieces pieces;
};

template <typename T>
void verify_rows(void* argument, int) {
  static thread_local std::vector<Sum<T>> p;
  Rows& rows = *static_cast<Rows*>(argument);
  p.resize(rows.verification.V);
  for (int b; (b = rows.pieces.take()) < rows.verification.B;)
    verify_row<T>(rows.verification, b, p.data(), rows.largest[b]);
}

}  // namespace
