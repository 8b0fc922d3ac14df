#include "replay/stand_ins.hpp"

#include <cstring>

namespace moekit::replay {
namespace {

/// Never read: the stand-ins have no weights.
class NoFormat final : public PackFormat {
 public:
  std::string_view id() const override { return "none"; }
  int version() const override { return 1; }
  Verdict supports(const WeightsSpec&) const override { return Verdict::yes(); }
  std::size_t bytes(const WeightsSpec&) const override { return 64; }
  Status pack_expert(std::byte*, const WeightsSpec&, const CanonicalExpert&) const override { return {}; }
  Status unpack_expert(const std::byte*, const WeightsSpec&, const CanonicalExpert&) const override { return {}; }
};

std::vector<std::int32_t> flatten(const Json& rows) {
  std::vector<std::int32_t> out;
  if (rows.is_array())
    for (const Json& row : rows)
      for (const Json& id : row) out.push_back(id);
  return out;
}

Json counts_json(const ExpertTokens* tokens) {
  if (!tokens) return nullptr;
  const auto* counts = tokens->counts.as<std::int32_t>();
  Json out = {{"counts", std::vector<std::int32_t>(counts, counts + tokens->counts.numel())}, {"host", nullptr}};
  if (!tokens->host.empty()) out["host"] = std::vector<std::int32_t>(tokens->host.begin(), tokens->host.end());
  return out;
}

/// Column 0 holds row index + `base`; a gap shows as the word "scattered".
Json row_range(const Tensor& tensor, std::int64_t base) {
  const auto at = [&](std::int64_t row) {
    return static_cast<std::int64_t>(tensor.as<float>()[row * tensor.stride[0]]) - base;
  };
  const std::int64_t first = at(0);
  for (std::int64_t row = 0; row < tensor.rows(); ++row)
    if (at(row) != first + row) return "scattered";
  return {first, first + tensor.rows()};
}

Json scale_json(const Tensor& scale) {
  if (!scale.present()) return "none";
  if (scale.numel() == 1) return "one";
  return {{"rows", row_range(scale, 1)}};
}

std::vector<std::int64_t> extents(const Tensor& tensor) {
  return {tensor.shape.begin(), tensor.shape.begin() + tensor.rank};
}

}  // namespace

Scene::Scene(const Json& line) : config(line.at("config")) {
  M = config.at("M"), K = config.at("K"), N = config.at("N"), L = config.at("L"), G = config.at("G");
  k = config.at("k"), T = config.at("T");
  batched = config.at("format") == "batched";
  replaces_routing = config.at("replaces_routing");
  async = config.at("async"), a1_scale = config.at("a1_scale"), a2_scale = config.at("a2_scale");
  meta = config.at("meta"), output = config.at("output"), reduce = config.at("weight_and_reduce");
  arrived = config.at("arrived").is_null() ? M : config.at("arrived").get<std::int64_t>();

  ids = flatten(config.at("topk_ids"));
  dispatched_ids = flatten(line.at("dispatched_ids"));
  if (!config.at("map").is_null()) map = config.at("map").get<std::vector<std::int32_t>>();
  map_tensor = Tensor(map.data(), DType::i32, {static_cast<std::int64_t>(map.size())});
  weights.assign(ids.size(), 0.5f);
  dispatched_weights.assign(dispatched_ids.size(), 0.25f);

  const auto numbered = [](std::vector<float>& values, std::int64_t rows, std::int64_t columns, int base) {
    values.assign(static_cast<std::size_t>(rows * columns), 0.0f);
    for (std::int64_t row = 0; row < rows; ++row)
      values[static_cast<std::size_t>(row * columns)] = static_cast<float>(row + base);
  };
  const std::int64_t rows = batched ? L * T : arrived;
  numbered(hidden, M, K, 0);
  numbered(activations, rows, K, 0);
  numbered(scale1, a1_scale == "one" ? 1 : std::max<std::int64_t>(rows, 1), 1, 1);
  numbered(scale2, a2_scale == "one" ? 1 : std::max<std::int64_t>(rows, 1), 1, 1);
  counts.assign(static_cast<std::size_t>(L), 0);
}

Routing Scene::caller_routing() {
  return {Tensor(ids.data(), DType::i32, {M, k}), Tensor(weights.data(), DType::f32, {M, k})};
}

QuantSpec Scene::quant_spec() const {
  QuantSpec spec;  // only a static a2 scale needs a scheme that has one
  if (a2_scale == "none") return spec;
  spec.a1 = spec.w1 = spec.w2 = spec.a2 = {.type = DType::i8, .granularity = {1, -1}};
  spec.a2.static_scale = true;
  return spec;
}

Problem Scene::problem() const {
  Problem problem;
  problem.size = {L, M, N, K, k};
  problem.num_experts = G;
  problem.format = batched ? ActivationFormat::batched_experts : ActivationFormat::standard;
  if (batched) problem.batched = BatchedShape{T, 1};
  problem.quant = quant_spec();
  problem.weights = {.num_local = L,
                     .hidden = K,
                     .intermediate = N / 2,
                     .gated = true,
                     .w1 = problem.quant.w1,
                     .w2 = problem.quant.w2};
  problem.hidden_dtype = DType::f32;
  problem.weight_on_input = config.at("on_input");
  problem.expert_map = has_map();
  return problem;
}

// ---- dispatcher ----------------------------------------------------------------------------------------------------

void Dispatcher::record_prepare(const char* event, const PrepareArgs& args) {
  Json given_map = nullptr;
  if (args.expert_map) {
    const auto* values = args.expert_map->as<std::int32_t>();
    given_map = std::vector<std::int32_t>(values, values + args.expert_map->numel());
  }
  scene_.record(event, {{"rows", args.hidden.rows()},
                        {"num_experts", args.num_experts},
                        {"expert_map", given_map},
                        {"weight_on_input", args.weight_on_input}});
}

void Dispatcher::deliver(Dispatched& out) {
  Scene& s = scene_;
  out.activations.data = s.batched ? Tensor(s.activations.data(), DType::f32, {s.L, s.T, s.K})
                                   : Tensor(s.activations.data(), DType::f32, {s.arrived, s.K});
  if (s.a1_scale != "none")
    out.activations.scale = Tensor(s.scale1.data(), DType::f32, {static_cast<std::int64_t>(s.scale1.size()), 1});
  Routing routing = s.caller_routing();
  if (s.replaces_routing) {
    // an empty vector has no address, and a routing without one is absent
    routing = {Tensor(s.dispatched_ids.data(), DType::i32, {s.arrived, s.k}),
               Tensor(s.dispatched_weights.data(), DType::f32, {s.arrived, s.k})};
    out.routing = routing;
  }
  if (s.meta == "none") return;
  (void)count_expert_tokens(routing.ids, s.has_map() ? &s.map_tensor : nullptr, s.counts);
  ExpertTokens tokens;
  tokens.counts = Tensor(s.counts.data(), DType::i32, {s.L});
  if (s.meta == "device+host") tokens.host = s.counts;
  out.tokens = tokens;
}

Status Dispatcher::prepare(const PrepareArgs& args, Dispatched& out) {
  record_prepare("prepare", args);
  deliver(out);
  return {};
}

Status Dispatcher::prepare_async(const PrepareArgs& args, Pending<Dispatched>& out) {
  record_prepare("prepare_async", args);
  Pending<Dispatched>::Functions functions;
  if (scene_.async == "hook")
    functions.hook = [](void* self) {
      static_cast<Dispatcher*>(self)->scene_.record("prepare_hook");
      return Status();
    };
  functions.receive = [](void* self, Dispatched& result) {
    static_cast<Dispatcher*>(self)->scene_.record("prepare_receiver");
    static_cast<Dispatcher*>(self)->deliver(result);
    return Status();
  };
  out = Pending<Dispatched>(functions, this);
  return {};
}

void Dispatcher::record_finalize(const char* event, const FinalizeArgs& args) {
  Scene& s = scene_;
  const auto owner = [](const void* data, const void* caller, const void* dispatched, bool replaced) {
    return replaced && data == dispatched ? "dispatched" : data == caller ? "caller" : "somebody else's";
  };
  const std::string ids = owner(args.routing.ids.data, s.ids.data(), s.dispatched_ids.data(), s.replaces_routing);
  const std::string weights =
      owner(args.routing.weights.data, s.weights.data(), s.dispatched_weights.data(), s.replaces_routing);
  const std::string tag = to_string(args.reduce);
  scene_.record(event, {{"output_rows", args.output.rows()},
                        {"fused_shape", extents(args.expert_output)},
                        {"routing_rows", args.routing.num_tokens()},
                        {"routing", ids == weights ? ids : ids + " ids, " + weights + " weights"},
                        {"weight_on_input", args.weight_on_input},
                        {"weight_and_reduce", tag}});
  // which rows of the experts' output each apply wrote can be told only now
  const auto* base = static_cast<const std::byte*>(args.expert_output.data);
  std::size_t next = 0;
  for (Json& e : s.events)
    if (e[0] == "apply")
      e[1]["output_first_row"] = (s.apply_outputs[next++] - base) / (s.K * static_cast<std::int64_t>(sizeof(float)));
}

Status Dispatcher::finalize(const FinalizeArgs& args) {
  record_finalize("finalize", args);
  return {};
}

Status Dispatcher::finalize_async(const FinalizeArgs& args, Pending<Nothing>& out) {
  record_finalize("finalize_async", args);
  Pending<Nothing>::Functions functions;
  if (scene_.async == "hook")
    functions.hook = [](void* self) {
      static_cast<Dispatcher*>(self)->scene_.record("finalize_hook");
      return Status();
    };
  functions.receive = [](void* self, Nothing&) {
    static_cast<Dispatcher*>(self)->scene_.record("finalize_receiver");
    return Status();
  };
  out = Pending<Nothing>(functions, this);
  return {};
}

// ---- experts -------------------------------------------------------------------------------------------------------

const PackFormat& RecordingExperts::preferred_format(const WeightsSpec&) const {
  static const NoFormat format;
  return format;
}

ExpertsWorkspace RecordingExperts::workspace(const Problem& problem, const ExpertTokens* tokens) const {
  const ProblemSize& size = problem.size;
  const Json question = {{"M", size.M},
                         {"N", size.N},
                         {"K", size.K},
                         {"topk", size.k},
                         {"global_num_experts", problem.num_experts},
                         {"local_num_experts", size.L},
                         {"meta", counts_json(tokens)}};
  scene_.questions.push_back(question);
  const std::int64_t rows = scene_.batched ? size.L * size.M : size.M * size.k;
  ExpertsWorkspace out;
  out.w13_bytes = static_cast<std::size_t>(rows * std::max(size.N, size.K)) * sizeof(float);
  out.w2_bytes = static_cast<std::size_t>(rows * (size.N / 2)) * sizeof(float);
  if (scene_.batched)
    out.output = {DType::f32, 3, {size.L, size.M, size.K}};
  else
    out.output = {DType::f32, 2, {scene_.output == "M,K" ? size.M : size.M * size.k, size.K}};
  return out;
}

WeightAndReduce RecordingExperts::weight_and_reduce() const {
  return scene_.reduce == "NoOp"         ? WeightAndReduce::no_op()
         : scene_.reduce == "Contiguous" ? WeightAndReduce::contiguous()
                                         : WeightAndReduce::delegate();
}

Status RecordingExperts::apply(const ExpertsArgs& args, ExpertsResult& result) const {
  const Tensor& rows = args.activations.data;
  const Json input_rows = scene_.batched ? Json("batched") : row_range(rows, 0);
  scene_.record("apply", {{"input_rows", input_rows},
                          {"output_shape", extents(args.output)},
                          {"output_first_row", "unknown until finalize"},
                          {"ids_rows", args.routing.num_tokens()},
                          {"a1_scale", scale_json(args.activations.scale)},
                          {"a2_scale", scale_json(args.a2_scale)},
                          {"activation", moekit::name(args.activation.kind)},
                          {"global_num_experts", args.num_experts},
                          {"meta", counts_json(args.tokens)},
                          {"workspace13_bytes", args.workspace13.size},
                          {"workspace2_bytes", args.workspace2.size},
                          {"weight_on_input", args.weight_on_input}});
  scene_.apply_outputs.push_back(static_cast<const std::byte*>(args.output.data));
  // everything that was given may be written
  std::memset(args.workspace13.data, 0x5a, args.workspace13.size);
  std::memset(args.workspace2.data, 0x5a, args.workspace2.size);
  std::memset(args.output.data, 0, static_cast<std::size_t>(args.output.numel()) * sizeof(float));
  result.output = args.output;
  return {};
}

}  // namespace moekit::replay
