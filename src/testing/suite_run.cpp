#include "testing/suite_run.hpp"

#include <algorithm>
#include <cstring>

#include "experts/call.hpp"
#include "experts/canonical.hpp"
#include "quant/quantise.hpp"
#include "text.hpp"

namespace moekit::suite {
using text::concat;

namespace {

QuantTensors static_scales(const SuiteCase& c) {
  QuantTensors out;
  if (!c.a1_scale.empty())
    out.a1_scale = Tensor(c.a1_scale.data(), DType::f32, {static_cast<std::int64_t>(c.a1_scale.size())});
  if (!c.a2_scale.empty()) {
    const auto n = static_cast<std::int64_t>(c.a2_scale.size());
    out.a2_scale =
        c.a2_per_row ? Tensor(c.a2_scale.data(), DType::f32, {n, 1}) : Tensor(c.a2_scale.data(), DType::f32, {n});
  }
  return out;
}

/// Case ids as local slots, as the rules say; -1 where a route is not here.
std::vector<std::int64_t> slots_of(const SuiteCase& c) {
  ExpertsArgs args;
  args.weights.spec.num_local = c.num_local;
  const Tensor map(c.map.data(), DType::i32, {static_cast<std::int64_t>(c.map.size())});
  args.expert_map = c.map.empty() ? nullptr : &map;
  args.routing.id_space = c.id_space;
  std::vector<std::int64_t> out;
  for (std::int32_t id : c.ids) out.push_back(experts::local_slot(id, args));
  return out;
}

}  // namespace

PreparedCall::PreparedCall(const SuiteCase& c, ActivationFormat format, bool quantised)
    : quant_(c.config.quant, static_scales(c)) {
  memory_.reserve(8);
  if (format == ActivationFormat::standard)
    arrange_standard(c, quantised);
  else
    arrange_batched(c, quantised);
  add_routing(c);
  args_.activation = c.config.activation;
  args_.num_experts = c.num_experts();
  args_.quant = &quant_;
  args_.a2_scale = quant_.a2_scale();
  args_.weight_on_input = c.weight_on_input;
  args_.weights.spec = c.weights->spec();
  args_.weights.spec.num_local = c.num_local;
  for (const Guarded& piece : memory_) copies_.emplace_back(piece.data(), piece.data() + piece.size());
}

Guarded& PreparedCall::keep(std::size_t bytes) { return memory_.emplace_back(bytes, std::byte{0xff}); }

bool PreparedCall::intact() const {
  for (std::size_t i = 0; i < memory_.size(); ++i)
    if (!memory_[i].intact() || !std::equal(copies_[i].begin(), copies_[i].end(), memory_[i].data())) return false;
  return true;
}

void PreparedCall::make_activations(const SuiteCase& c, bool quantised, std::int64_t num_rows, std::int64_t stride) {
  const QuantDesc& a1 = c.config.quant.a1;
  const bool codes = quantised && !is_float(a1.type);
  const DType type = codes ? a1.type : c.config.dtype;
  // the last row ends at its last element: nothing beyond it may be touched
  const std::int64_t elements = num_rows > 0 ? (num_rows - 1) * stride + c.K() : 0;
  args_.activations.data = Tensor::strided(keep(static_cast<std::size_t>(elements * bytes(type))).data(), type,
                                           {num_rows, c.K()}, {stride, 1});
  if (!codes) return;
  const std::int64_t groups = quant::scale_extent(c.K(), a1.granularity.cols);
  args_.activations.scale =
      Tensor(keep(static_cast<std::size_t>(num_rows * groups * 4)).data(), DType::f32, {num_rows, groups});
  args_.activations.granularity = a1.granularity;
}

void PreparedCall::write_row(const SuiteCase& c, bool quantised, std::int64_t from, float factor, std::int64_t to) {
  const Tensor& data = args_.activations.data;
  const quant::RowSource row{c.rows.data() + from * c.K(), DType::f32, c.K(), factor};
  auto* target = data.as<std::byte>() + to * data.stride[0] * bytes(data.dtype);
  if (!quantised || is_float(c.config.quant.a1.type)) {
    for (std::int64_t i = 0; i < c.K(); ++i)
      numeric::store_f32(target, data.dtype, i, c.rows[static_cast<std::size_t>(from * c.K() + i)] * factor);
    return;
  }
  const QuantSpec& spec = c.config.quant;
  quant::RowScheme scheme{spec.a1.type, spec.a1.granularity.cols, spec.int8_divisor};
  if (!c.a1_scale.empty()) scheme.static_scale = c.a1_scale[0];
  quant::quantise_row(row, scheme, target, &args_.activations.scale.at<float>(to, 0));
}

void PreparedCall::arrange_standard(const SuiteCase& c, bool quantised) {
  make_activations(c, quantised, c.M, c.K() + c.padding);
  for (std::int64_t t = 0; t < c.M; ++t)
    write_row(c, quantised, t, c.weight_on_input ? c.route_weights[static_cast<std::size_t>(t)] : 1.0f, t);
  std::vector<std::int32_t> counts(static_cast<std::size_t>(c.num_local));
  for (std::int64_t slot : slots_of(c))
    if (slot >= 0) ++counts[static_cast<std::size_t>(slot)];
  tokens_ = ExpertTokens::from_host(counts, {}, {});
  args_.tokens = &tokens_;
}

void PreparedCall::arrange_batched(const SuiteCase& c, bool quantised) {
  const std::vector<std::int64_t> slots = slots_of(c);
  std::vector<std::int32_t> counts(static_cast<std::size_t>(c.num_local));
  for (std::int64_t slot : slots)
    if (slot >= 0) ++counts[static_cast<std::size_t>(slot)];
  capacity_ = 3 + (counts.empty() ? 0 : *std::max_element(counts.begin(), counts.end()));
  make_activations(c, quantised, c.num_local * capacity_, c.K());
  std::vector<std::int64_t> filled(counts.size());
  for (std::size_t route = 0; route < slots.size(); ++route) {
    if (slots[route] < 0) continue;
    std::int64_t& row = filled[static_cast<std::size_t>(slots[route])];
    const float factor = c.weight_on_input ? c.route_weights[route] : 1.0f;
    write_row(c, quantised, static_cast<std::int64_t>(route) / c.k, factor, slots[route] * capacity_ + row++);
  }
  for (Tensor* t : {&args_.activations.data, &args_.activations.scale})  // [L·T·D, n] → [L, T·D, n]
    if (t->present()) *t = Tensor(t->data, t->dtype, {c.num_local, capacity_, t->shape[1]});
  tokens_ = ExpertTokens::from_host(counts, {}, {});
  args_.tokens = &tokens_;
}

void PreparedCall::add_routing(const SuiteCase& c) {
  const std::int64_t stride = c.k + c.padding, elements = c.M > 0 ? (c.M - 1) * stride + c.k : 0;
  auto* ids = reinterpret_cast<std::int32_t*>(keep(static_cast<std::size_t>(elements) * 4).data());
  auto* weights = reinterpret_cast<float*>(keep(static_cast<std::size_t>(elements) * 4).data());
  for (std::int64_t t = 0; t < c.M; ++t)
    for (std::int64_t j = 0; j < c.k; ++j) {
      ids[t * stride + j] = c.ids[static_cast<std::size_t>(t * c.k + j)];
      weights[t * stride + j] = c.route_weights[static_cast<std::size_t>(t * c.k + j)];
    }
  args_.routing = {Tensor::strided(ids, DType::i32, {c.M, c.k}, {stride, 1}),
                   Tensor::strided(weights, DType::f32, {c.M, c.k}, {stride, 1}), c.id_space};
  if (c.map.empty()) return;
  auto* map = reinterpret_cast<std::int32_t*>(keep(c.map.size() * 4).data());
  std::copy(c.map.begin(), c.map.end(), map);
  map_ = Tensor(map, DType::i32, {static_cast<std::int64_t>(c.map.size())});
  args_.expert_map = &map_;
}

ActivationFormat format_of(const ExpertsEntry& entry) {
  MakeContext context;
  context.batched = BatchedShape{1, 1};
  const auto batched = entry.make(context);  // may be nothing: not for such rows
  return batched ? batched->activation_formats().in : ActivationFormat::standard;
}

Subject::Subject(const ExpertsEntry& entry, const SuiteCase& c, std::int64_t capacity) {
  const ActivationFormat format = format_of(entry);
  MakeContext context;
  if (format == ActivationFormat::batched_experts) context.batched = BatchedShape{capacity, 1};
  experts_ = entry.make(context);
  if (!experts_)
    throw Error(StatusCode::invalid_argument,
                text::concat("[suite] ", entry.name, " makes nothing, neither for standard nor for batched rows"), "",
                "make");
  problem_ = problem_of(c, format, capacity);
}

oracle::Rounded Subject::rounded() const {
  oracle::Rounded out{experts_->roundings(problem_), experts_->workspace(problem_).output.dtype};
  if (experts_->weight_and_reduce().kind != WeightAndReduce::Kind::contiguous) return out;
  out.at.expert_output = out.output;  // rows are stored before they are weighted; the suite reduces into f32
  out.output = DType::f32;
  return out;
}

std::string Subject::check_input_spec() const {
  const InputSpec given = experts::input_spec(problem_), wanted = experts_->input_spec(problem_);
  if (wanted.deferred || wanted == given) return {};
  return concat("wants rows as ", to_string(wanted), ", the scheme has ", to_string(given));
}

RunResult Subject::run(const SuiteCase& c, const PreparedCall& call, const RunOptions& options) const {
  RunResult result;
  if (result.problem = check_input_spec(); !result.problem.empty()) return result;
  Problem problem = problem_;
  Executor& executor = options.executor ? *options.executor : cpu_executor();
  problem.threads = executor.concurrency();
  const ExpertsWorkspace needed = experts_->workspace(problem);
  Guarded w13(needed.w13_bytes, options.poison), w2(needed.w2_bytes, options.poison);
  const std::size_t output_bytes = needed.output.bytes();
  const bool shared = options.output_over_w13 && output_bytes <= needed.w13_bytes;
  Guarded output(shared ? 0 : output_bytes, options.poison);

  ExpertsArgs args = call.args();
  const PackFormat& format = experts_->preferred_format(problem.weights);
  args.weights = c.weights->view(format, c.num_local);
  args.output = needed.output.on(shared ? w13.data() : output.data(), {});
  args.workspace13 = w13.bytes();
  args.workspace2 = w2.bytes();
  args.context.stream.executor = &executor;
  if (!options.give_counts) args.tokens = nullptr;

  ExpertsResult left;
  const Status status = experts_->apply(args, left);
  if (!status.ok())
    result.problem = status.to_string();
  else if (!w13.intact() || !w2.intact())
    result.problem = "wrote outside of its workspace";
  else if (!output.intact())
    result.problem = "wrote outside of its output";
  else if (!call.intact())
    result.problem = "changed an input";
  else if (left.open)
    result.problem = "left its output open without being asked";
  else if (left.output.data != args.output.data)
    result.problem = "returned another output than the one it was given";
  result.output = args.output;
  result.memory = shared ? std::move(w13) : std::move(output);
  return result.problem.empty() ? finish(c, args, std::move(result)) : std::move(result);
}

RunResult Subject::finish(const SuiteCase& c, const ExpertsArgs& args, RunResult result) const {
  const WeightAndReduce reduce = experts_->weight_and_reduce();
  if (reduce.kind != WeightAndReduce::Kind::contiguous) return result;
  Guarded reduced(static_cast<std::size_t>(c.M * c.K() * 4), std::byte{0xff});
  const Tensor out(reduced.data(), DType::f32, {c.M, c.K()});
  Routing routing = args.routing;  // what a dispatcher would hand on: routes that are not here are -1
  std::vector<std::int32_t> ids;
  for (std::int64_t slot : slots_of(c)) ids.push_back(slot < 0 ? -1 : static_cast<std::int32_t>(slot));
  routing.ids = Tensor(ids.data(), DType::i32, {c.M, c.k});
  Tensor where;
  const Status status = reduce.apply(out, result.output, routing, c.weight_on_input, where);
  if (!status.ok()) result.problem = status.to_string();
  result.memory = std::move(reduced);
  result.output = out;
  return result;
}

}  // namespace moekit::suite
