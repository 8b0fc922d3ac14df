// What may share memory in a layer's call: nothing that is written, but output with hidden in place and residual_out
// with residual.
#include "layer_impl.hpp"
#include "tail/tail.hpp"
#include "tensor_checks.hpp"
#include "text.hpp"

namespace moekit::inline v0 {
using text::concat;

namespace {

struct Named {
  const char* name;
  const Tensor* tensor;
};

Status overlaps(const char* written, const char* other) {
  return Status(StatusCode::invalid_argument, concat("[layer] ", written, " overlaps ", other),
                concat("give ", written, " memory of its own"), written);
}

}  // namespace

Status LayerCall::check_overlaps() const {
  if (num_tokens_ == 0) return {};
  const bool tail = plan_.options.output == OutputKind::tail;
  const Tensor none;
  const Named read[] = {{"hidden", &in_.hidden},
                        {"logits", &in_.logits},
                        {"routing.ids", &in_.routing.ids},
                        {"routing.weights", &in_.routing.weights}};
  const Named written[] = {{"output", tail || open_ ? &none : &out_.tensor},
                           {"tail.norm_out", tail ? &out_.tail->norm_out : &none},
                           {"tail.residual_out", tail ? &out_.tail->residual_out : &none}};
  for (const Named& out : written)
    for (const Named& in : read) {
      const bool in_place = out_.in_place && out.tensor == &out_.tensor && in.tensor == &in_.hidden;
      if (!in_place && tensors::overlap(*out.tensor, *in.tensor)) return overlaps(out.name, in.name);
    }
  return {};
}

/// Against the bytes that the call needs: what lies behind them may be anybody's.
Status LayerCall::check_workspace(std::size_t needed) const {
  const bool tail = plan_.options.output == OutputKind::tail;
  const Tensor none;
  const Named all[] = {{"hidden", &in_.hidden},
                       {"logits", &in_.logits},
                       {"routing.ids", &in_.routing.ids},
                       {"routing.weights", &in_.routing.weights},
                       {"output", tail || open_ ? &none : &out_.tensor},
                       {"tail.residual", tail ? &out_.tail->residual : &none},
                       {"tail.gamma", tail ? &out_.tail->gamma : &none},
                       {"tail.norm_out", tail ? &out_.tail->norm_out : &none},
                       {"tail.residual_out", tail ? &out_.tail->residual_out : &none}};
  for (const Named& one : all)
    if (tensors::overlap(*one.tensor, context_.workspace.data, needed)) return overlaps(one.name, "the workspace");
  return {};
}

}  // namespace moekit::inline v0
