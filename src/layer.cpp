// route → (prepare → experts → finalize) → shared experts → output or tail.
#include <moekit/layer.hpp>

#include <algorithm>

#include "layer_impl.hpp"
#include "quant/numeric.hpp"
#include "text.hpp"

namespace moekit::inline v0 {
using text::concat;

Layer::Layer(Plan plan, Weights weights) {
  if (weights.plan_fingerprint() != plan.fingerprint())
    throw Error(StatusCode::invalid_argument, "[layer] the weights were packed for another plan",
                "pack them again with Weights::pack(plan, …)", "weights");
  auto impl = std::make_shared<Impl>(Impl{std::move(plan), std::move(weights), {}});
  const Weights::Impl& values = impl->weights.impl();
  for (const Plan::Impl::Bucket& bucket : impl->plan.impl().buckets) {
    if (!bucket.shared) {
      impl->kernels.push_back(bucket.kernel);
      continue;
    }
    impl->kernels.push_back(std::make_shared<const ModularKernel>(
        bucket.prepare_finalize, bucket.experts,
        bucket.shared->bound(values.shared_view, values.shared_gate, &values.shared_quant), bucket.problem,
        bucket.kernel_options));
  }
  impl_ = std::move(impl);
}

const Plan& Layer::plan() const { return impl_->plan; }
const Weights& Layer::weights() const { return impl_->weights; }
Status Layer::check() const { return {}; }

Status Layer::forward(const LayerInput& in, LayerOutput& out, const CallContext& context) const {
  LayerCall call{*impl_, in, out, context};
  if (Status s = call.check(); !s.ok()) return s;
  if (call.num_tokens() == 0) return call.leave_empty();
  if (Status s = call.cut(); !s.ok()) return s;
  if (Status s = call.route(); !s.ok()) return s;
  if (Status s = call.run_kernel(); !s.ok()) return s;
  return call.finish();
}

}  // namespace moekit::inline v0
