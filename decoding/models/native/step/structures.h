// What the calls read and write; library.py declares the same structures.
//
// Shapes: B rows, N new tokens, C hidden size, Q query heads, H key/value heads, D head size, F feed-forward size,
// S slots of the cache, V rows of the output layer or tokens of a distribution.

#pragma once

#include <cstdint>

namespace {

extern "C" {

// All pointers of a layer are to contiguous arrays of the model's dtype; null where the layer has none.
struct Layer {
  const void* attention_norm;  // (C,)
  // (C,) of a layer that reads a token and a state side by side: `attention_norm` norms the token's embedding, and this
  // the state before the layer. Its `qkv` has 2 * C inputs. Null: other layers
  const void* state_norm;
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
  int32_t reads_prompts;   // whether the tokens are of prompts, of which no logits are wanted
  const int64_t* tokens;   // (B, N)
  const int64_t* parents;  // (B, grown + N), negative for a root; null: a chain
  const int64_t* lengths;  // (B,) committed tokens
  const int32_t* columns;  // (layers + 1,) place of each layer's hidden states in `hidden`, or -1
  void* hidden;            // (B, N, taps * C) of the model's dtype
  void* logits;            // (B, N, V), in the type of the sums; null: not wanted
  const int32_t* nodes;    // (B,) the one node of each row whose logits are wanted, as (B, V); null: all nodes
  const int32_t* places;   // (B,) rows of the cache, in which a row may be again, further on; null: 0 to B - 1
  int32_t sees_all;        // whether each token sees all new tokens of its row; only without parents
  const void* states;      // (B, N, C) of the model's dtype, the states before the layers; null: the tokens' embeddings
  int32_t grown;           // nodes of each tree before these, whose keys and values follow the committed ones
  int32_t before_norm;     // whether the last layer's hidden states are those before the final norm
};

// The random numbers of a round (decoding/sampling/noise.py), and the temperature at which they sample.
struct Draws {
  double temperature;        // 0: the largest logit, without random numbers
  const uint64_t* keys;      // (B,) of seed, request and round
  const int64_t* positions;  // (B,) of the round's first token
  const int64_t* shared;     // (B, width) of seed, request and a depth's position; null: not the coupled rule
  int32_t width;
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
  int32_t threads;
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

}  // namespace
