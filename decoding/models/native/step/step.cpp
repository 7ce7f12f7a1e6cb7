// The calls of the `fused` execution of the native target on a CPU: one forward of a Llama-family decoder over
// few new tokens, chains of drafted tokens, and single products (decoding/models/native/fused.py and chains.py).
//
// A decode step reads every weight once, so its time is bounded by the memory's bandwidth. Here a team of
// threads stays in one parallel region for the whole forward and meets at five barriers a layer.
//
// Each output is one dot product, whose terms are added in an order that does not depend on the number of
// rows, and each query adds its visible keys in the order of their positions. So a token's logits have
// the same bits whether it is decoded alone, in a batch, in a drafted chain or in a tree. The tokens of a
// prompt, of which no logits are wanted, may have others, whatever prompts are read beside it.
//
// The headers are parts of this translation unit, the only one, so that the compiler sees each loop with its
// constants. Shapes: those of structures.h, K inputs and O outputs of a product, M rows.

#include <cstdint>
#include <mutex>
#include <type_traits>
#include <vector>

#include "chains.h"
#include "forward.h"
#include "products.h"
#include "structures.h"
#include "team.h"
#include "tiles.h"
#include "vectors.h"

namespace {

std::mutex one_call;

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
  std::lock_guard<std::mutex> lock(one_call);
  Rows rows{*v, std::vector<std::array<double, 2>>(v->B, {v->largest[0], v->largest[1]}), {}};
  const auto function = v->dtype == 0 ? verify_rows<float> : v->dtype == 1 ? verify_rows<double> : verify_rows<BFloat16>;
  v->B > 1 ? team_of(v->threads).run(function, &rows) : function(&rows, 0);
  for (const auto& largest : rows.largest)
    for (int i = 0; i < 2; ++i) watch(v->largest[i], largest[i]);
  return 0;
}
