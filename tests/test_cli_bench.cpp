// A wrong result is never printed as a time: the oracle, the verifier, and bench with an implementation that is broken.
#include <gtest/gtest.h>

#include <cmath>

#include "bench.hpp"
#include "quant/numeric.hpp"
#include "verbs.hpp"

namespace moekit::cli {
namespace {

// ---- the oracle, against numbers that can be checked by hand
// ---------------------------------------------------------

TEST(Oracle, one_expert_by_hand) {
  LayerConfig config;
  config.num_experts = 1;
  config.top_k = 1;
  config.hidden = 2;
  config.intermediate = 1;
  config.dtype = DType::f32;
  ASSERT_TRUE(quant_from_names("f32", "f32", config.quant).ok());
  const float gate[] = {1, 0}, up[] = {0, 2}, down[] = {3, -4}, x[] = {0.5f, 0.25f}, weight[] = {0.5f};
  const std::int32_t id[] = {0};
  WeightsSource source;
  source.expert = [&](std::int64_t, CanonicalExpert& e) {
    e = {};
    e.gate = Tensor(gate, DType::f32, {1, 2});
    e.up = Tensor(up, DType::f32, {1, 2});
    e.down = Tensor(down, DType::f32, {2, 1});
    return Status();
  };
  const OracleResult out = oracle({config,
                                   source,
                                   Tensor(x, DType::f32, {1, 2}),
                                   {Tensor(id, DType::i32, {1, 1}), Tensor(weight, DType::f32, {1, 1})},
                                   {0}});
  const double h = 0.5 / (1 + std::exp(-0.5)) * 0.5;  // silu(gate · x) · (up · x)
  EXPECT_DOUBLE_EQ(out.y[0], 0.5 * 3 * h);
  EXPECT_DOUBLE_EQ(out.y[1], 0.5 * -4 * h);
  EXPECT_DOUBLE_EQ(out.noise[1], 0.5 * 4 * h);
}

// ---- the verifier
// -----------------------------------------------------------------------------------------------------

class Verifier : public testing::Test {
 protected:
  void SetUp() override {
    config_.num_experts = 6;
    config_.top_k = 2;
    config_.hidden = 48;
    config_.intermediate = 40;
    config_.dtype = DType::bf16;
    ASSERT_TRUE(quant_from_names("bf16", "bf16", config_.quant).ok());
    source_ = generated_weights(config_, 1);
    x_ = generated_rows(kTokens, 48, DType::bf16, 2);
    ids_ = Buffer(DType::i32, {kTokens, 2});
    weights_ = Buffer(DType::f32, {kTokens, 2});
    for (std::int64_t t = 0; t < kTokens; ++t)
      for (std::int64_t j = 0; j < 2; ++j) {
        ids_.tensor.at<std::int32_t>(t, j) = static_cast<std::int32_t>((t + 3 * j) % 6);
        weights_.tensor.at<float>(t, j) = j == 0 ? 0.75f : 0.25f;
      }
    std::vector<std::int64_t> all;
    for (std::int64_t t = 0; t < kTokens; ++t) all.push_back(t);
    const Routing routing{ids_.tensor, weights_.tensor};
    const OracleResult exact = oracle({config_, source_, x_.tensor, routing, all});
    y_ = Buffer(DType::bf16, {kTokens, 48});
    for (std::int64_t i = 0; i < kTokens * 48; ++i)
      numeric::store_f32(y_.bytes.data(), DType::bf16, i, static_cast<float>(exact.y[static_cast<std::size_t>(i)]));
    expected_.rows = {0, kTokens - 1};
    expected_.values = oracle({config_, source_, x_.tensor, routing, expected_.rows});
    expected_.other = Buffer(DType::bf16, {kTokens, 48});
    expected_.other.bytes = y_.bytes;
    expected_.other.tensor = Tensor(expected_.other.bytes.data(), DType::bf16, {kTokens, 48});
    expected_.other_name = "other";
  }
  void set(std::int64_t t, std::int64_t c, float value) {
    numeric::store_f32(y_.bytes.data(), DType::bf16, t * 48 + c, value);
  }
  float get(std::int64_t t, std::int64_t c) { return numeric::load_f32(y_.bytes.data(), DType::bf16, t * 48 + c); }
  Verification verify() { return verify_result(y_.tensor, expected_, config_); }

  static constexpr std::int64_t kTokens = 50;
  LayerConfig config_;
  WeightsSource source_;
  Buffer x_, ids_, weights_, y_;
  Expected expected_;
};

TEST_F(Verifier, accepts_the_right_result_rounded_once) {
  const Verification found = verify();
  EXPECT_TRUE(found.ok) << found.failure;
  EXPECT_LT(found.max_rel, 4e-3);
}

TEST_F(Verifier, refuses_one_wrong_element_of_a_sampled_row) {
  set(0, 17, get(0, 17) + 0.1f * static_cast<float>(expected_.values.largest));
  const Verification found = verify();
  EXPECT_FALSE(found.ok);
  EXPECT_NE(found.failure.find("[0, 17]"), std::string::npos) << found.failure;
}

TEST_F(Verifier, refuses_a_wrong_row_that_was_not_sampled) {
  for (std::int64_t c = 0; c < 48; ++c) set(23, c, get(22, c));
  const Verification found = verify();
  EXPECT_FALSE(found.ok);
  EXPECT_NE(found.failure.find("row 23"), std::string::npos) << found.failure;
}

TEST_F(Verifier, refuses_a_row_that_nobody_wrote) {
  expected_.other = {};  // even without a second implementation
  for (std::int64_t c = 0; c < 48; ++c) set(23, c, std::nanf(""));
  EXPECT_FALSE(verify().ok);
}

// ---- bench with a broken implementation -----------------------------------------------------------------------------

enum class Fault { last_row, threads };

/// The reference with one element of its last row wrong, or one that the number of threads decides.
class Broken final : public Experts {
 public:
  Broken(std::unique_ptr<Experts> inner, Fault fault) : inner_(std::move(inner)), fault_(fault) {}
  std::string_view name() const override { return "broken"; }
  Verdict supports(const Problem& p) const override { return inner_->supports(p); }
  Formats activation_formats() const override { return inner_->activation_formats(); }
  bool accepts(const PackFormat& f) const override { return inner_->accepts(f); }
  const PackFormat& preferred_format(const WeightsSpec& s) const override { return inner_->preferred_format(s); }
  InputSpec input_spec(const Problem& p) const override { return inner_->input_spec(p); }
  ExpertsWorkspace workspace(const Problem& p, const ExpertTokens* t) const override { return inner_->workspace(p, t); }
  WeightAndReduce weight_and_reduce() const override { return inner_->weight_and_reduce(); }
  Determinism determinism() const override { return inner_->determinism(); }
  double estimate_us(const Problem& p, const Ceilings& c) const override { return inner_->estimate_us(p, c); }
  Status apply(const ExpertsArgs& args, ExpertsResult& result) const override {
    if (Status s = inner_->apply(args, result); !s.ok()) return s;
    const Tensor& y = result.output;
    const std::int64_t at = (y.shape[0] - 1) * y.stride[0] + y.shape[1] / 2;
    if (fault_ == Fault::last_row)
      numeric::store_f32(y.data, y.dtype, at, 1.0f + 2.0f * numeric::load_f32(y.data, y.dtype, at));
    else if (args.context.stream.executor->concurrency() == 8)
      numeric::store_f32(y.data, y.dtype, 0, 1.0f);
    return {};
  }

 private:
  std::unique_ptr<Experts> inner_;
  Fault fault_;
};

template <Fault fault>
std::unique_ptr<Experts> make_broken(const MakeContext& context) {
  for (const ExpertsEntry& entry : experts_implementations())
    if (entry.name == "reference") return std::make_unique<Broken>(entry.make(context), fault);
  return nullptr;
}

TEST(Bench, prints_no_row_for_a_wrong_result) {
  const ExpertsEntry broken[] = {{"broken", make_broken<Fault::last_row>, [] { return Verdict::yes(); }}};
  BenchArgs args;
  args.subject = "e4k2h64i32:bf16";
  args.impl = "broken";
  args.tokens = {1, 5};
  args.seconds = 0.01;
  args.json = true;
  args.extra_experts = broken;
  testing::internal::CaptureStdout();
  testing::internal::CaptureStderr();
  const Exit exit = run_bench(args);
  const std::string out = testing::internal::GetCapturedStdout(), err = testing::internal::GetCapturedStderr();
  EXPECT_EQ(exit, Exit::check_failed);
  EXPECT_EQ(out, "");
  EXPECT_NE(err.find("WRONG RESULT"), std::string::npos) << err;
  EXPECT_NE(err.find("e4k2h64i32:bf16"), std::string::npos) << err;
}

TEST(BenchCopies, are_as_many_as_keep_weights_cold_and_no_more_than_calls) {
  constexpr double kMiB = 1048576;
  EXPECT_GE(copies_needed(64 * kMiB, 8 * kMiB, 1 << 20), 16);  // at least 1 GiB altogether
  EXPECT_EQ(copies_needed(0.01 * kMiB, 0.01 * kMiB, 28), 28);
  EXPECT_EQ(copies_needed(8192 * kMiB, 4096 * kMiB, 28), 1);
  BenchArgs args;
  args.seconds = 0.01;
  EXPECT_EQ(most_calls(args), 28);
  args.gap_ms = 10;
  EXPECT_EQ(most_calls(args), 428);
  args.seconds = 600;
  EXPECT_EQ(most_calls(args), 3408);
}

std::string bits_of(const ExpertsEntry& entry, Exit expected) {
  VerifyArgs args;
  args.subject = "e4k2h64i32:bf16";
  args.impl = std::string(entry.name);
  args.tokens = {1, 5};
  args.bits = args.json = true;
  args.extra_experts = {&entry, 1};
  testing::internal::CaptureStdout();
  EXPECT_EQ(run_verify(args), expected);
  return testing::internal::GetCapturedStdout();
}

TEST(VerifyBits, finds_bits_that_depend_on_other_rows_or_on_threads) {
  const auto anywhere = [] { return Verdict::yes(); };
  const std::string rows = bits_of({"broken", make_broken<Fault::last_row>, anywhere}, Exit::check_failed);
  EXPECT_NE(rows.find(R"("case":"M5 bits, rows alone: 0 1 2 3 4")"), std::string::npos) << rows;
  EXPECT_NE(rows.find(R"("ok":false)", rows.find("rows alone")), std::string::npos) << rows;
  const std::string threads = bits_of({"broken", make_broken<Fault::threads>, anywhere}, Exit::check_failed);
  for (const char* tokens : {"M1", "M5"}) {
    const std::size_t at = threads.find(std::string("\"case\":\"") + tokens + " bits, threads 8\"");
    ASSERT_NE(at, std::string::npos) << threads;
    EXPECT_LT(threads.find(R"("ok":false)", at), threads.find('\n', at)) << threads;
  }
}

}  // namespace
}  // namespace moekit::cli
