// Which bits an implementation promises to keep, and whether it does.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "console.hpp"
#include "quant/numeric.hpp"
#include "seeded_random.hpp"
#include "session.hpp"
#include "verify_checks.hpp"

namespace moekit::cli {
using seeded::Random;

namespace {

/// Rows [M, K] of the layer's type with routing, owned.
struct Rows {
  Buffer x, ids, weights;
};

Rows gathered(const Tensor& x, const Routing& routing, const std::vector<std::int64_t>& order) {
  const auto M = static_cast<std::int64_t>(order.size());
  Rows out{Buffer(x.dtype, {M, x.shape[1]}), Buffer(DType::i32, {M, routing.top_k()}),
           Buffer(DType::f32, {M, routing.top_k()})};
  for (std::int64_t t = 0; t < M; ++t) {
    const std::int64_t from = order[static_cast<std::size_t>(t)];
    std::memcpy(out.x.tensor.index(t).data, x.index(from).data, static_cast<std::size_t>(x.shape[1] * bytes(x.dtype)));
    for (std::int64_t j = 0; j < routing.top_k(); ++j) {
      out.ids.tensor.at<std::int32_t>(t, j) = routing.ids.at<std::int32_t>(from, j);
      out.weights.tensor.at<float>(t, j) = routing.weights.at<float>(from, j);
    }
  }
  return out;
}

class DeterminismCheck {
 public:
  DeterminismCheck(Subjected& s, const ExpertsEntry& entry, const CaseRows& rows, Determinism level)
      : s_(s), entry_(entry), case_(rows), level_(level), M_(rows.in.shape[0]), config_(s.layer.config) {
    std::vector<std::int64_t> order(static_cast<std::size_t>(M_));
    std::iota(order.begin(), order.end(), 0);
    x_ = converted(rows.in, config_.dtype);
    rows_ = gathered(x_.tensor, rows.routing, order);
    session_.emplace(config_, options(s.threads), s.source);
    want_ = run(*session_, rows_);
  }

  void repeat() {
    session_->poison();
    report("repeat", run(*session_, rows_));
  }
  void permute() {
    std::vector<std::int64_t> order(static_cast<std::size_t>(M_));
    std::iota(order.begin(), order.end(), 0);
    Random random(4);
    for (std::int64_t i = M_ - 1; i > 0; --i)
      std::swap(order[static_cast<std::size_t>(i)], order[static_cast<std::size_t>(random.below(i + 1))]);
    const Buffer y = run(*session_, gathered(x_.tensor, case_.routing, order));
    Buffer back(config_.dtype, {M_, config_.hidden});
    for (std::int64_t t = 0; t < M_; ++t) copy_row(y, t, back, order[static_cast<std::size_t>(t)]);
    report("permute", back);
  }
  /// Nine rows more, not routed (-1) and full of NaN.
  void pad() {
    Rows more{Buffer(config_.dtype, {M_ + kPadding, config_.hidden}), Buffer(DType::i32, {M_ + kPadding, top_k()}),
              Buffer(DType::f32, {M_ + kPadding, top_k()})};  // 0xFF: NaN rows, ids -1, NaN weights
    std::memcpy(more.x.bytes.data(), rows_.x.bytes.data(), rows_.x.bytes.size());
    std::memcpy(more.ids.bytes.data(), rows_.ids.bytes.data(), rows_.ids.bytes.size());
    std::memcpy(more.weights.bytes.data(), rows_.weights.bytes.data(), rows_.weights.bytes.size());
    const Buffer y = run(*session_, more);
    Buffer first(config_.dtype, {M_, config_.hidden});
    std::memcpy(first.bytes.data(), y.bytes.data(), first.bytes.size());
    report("pad", first);
  }
  void split() {
    Buffer y(config_.dtype, {M_, config_.hidden});
    const std::int64_t sizes[] = {1, 3, 7, 2};
    std::int64_t begin = 0;
    for (int i = 0; begin < M_; ++i) {
      const std::int64_t end = std::min(begin + sizes[i % 4], M_);
      std::vector<std::int64_t> order(static_cast<std::size_t>(end - begin));
      std::iota(order.begin(), order.end(), begin);
      const Buffer part = run(*session_, gathered(x_.tensor, case_.routing, order));
      for (std::int64_t t = begin; t < end; ++t) copy_row(part, t - begin, y, t);
      begin = end;
    }
    report("split", y);
  }
  void threads(int count) {
    Session other(config_, options(count), s_.source);
    report(format("threads %d", count).c_str(), run(other, rows_));
  }

  void finish() { s_.report.add_all(checks_, case_.name + " same bits, " + name(level_)); }

 private:
  static constexpr std::int64_t kPadding = 9;
  std::int64_t top_k() const { return case_.routing.top_k(); }

  PlanOptions options(int count) const {
    PlanOptions out;
    out.max_tokens = M_ + kPadding;
    out.determinism = level_;
    out.experts = std::string(entry_.name);
    out.executor = &executor_for(count);
    return out;
  }
  Buffer run(Session& session, const Rows& rows) const {
    Buffer y(config_.dtype, {rows.x.tensor.shape[0], config_.hidden});
    LayerInput in;
    in.hidden = rows.x.tensor;
    in.routing = {rows.ids.tensor, rows.weights.tensor};
    session.forward(in, y.tensor);
    return y;
  }
  void copy_row(const Buffer& from, std::int64_t t, const Buffer& to, std::int64_t u) const {
    std::memcpy(to.tensor.index(u).data, from.tensor.index(t).data,
                static_cast<std::size_t>(config_.hidden * bytes(config_.dtype)));
  }
  void report(const char* what, const Buffer& y) {
    Comparison found = compare(y.tensor, converted(want_.tensor, DType::f32).tensor, 0);
    found.ok = found.finite && y.bytes == want_.bytes;
    checks_.push_back(
        Check::of(s_.label, case_.name + " " + name(level_) + ": " + what, std::string(entry_.name), found));
  }

  Subjected& s_;
  std::vector<Check> checks_;
  const ExpertsEntry& entry_;
  const CaseRows& case_;
  Determinism level_;
  std::int64_t M_;
  LayerConfig config_;
  Buffer x_;
  Rows rows_;
  std::optional<Session> session_;
  Buffer want_;
};

}  // namespace

void check_determinism(Subjected& s, const CaseRows& rows) {
  for (const ExpertsEntry* entry : s.experts) {
    const Determinism level = entry->make({})->determinism();
    const std::string what = rows.name + " determinism";
    if (level == Determinism::fast) {
      s.report.add(Check::refuse(s.label, what, std::string(entry->name), "promises no bits (fast)"));
      continue;
    }
    try {
      DeterminismCheck check(s, *entry, rows, level);
      check.repeat();
      if (level == Determinism::batch_invariant) {
        check.permute();
        check.pad();
        check.split();
        for (const int count : {1, 2, 3, 8}) check.threads(count);
      }
      check.finish();
    } catch (const Error& error) {
      if (error.code() != StatusCode::unsupported) throw;
      s.report.add(Check::refuse(s.label, what, std::string(entry->name), error.status().message()));
    }
  }
}

}  // namespace moekit::cli
