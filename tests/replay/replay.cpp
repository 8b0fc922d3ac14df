#include "replay/replay.hpp"

#include <cstring>
#include <memory>
#include <set>

#include "replay/stand_ins.hpp"

namespace moekit::replay {
namespace {

constexpr std::size_t kGuard = 256;

std::int64_t f32_bytes(const Json& shape) {
  std::int64_t bytes = sizeof(float);
  for (const Json& extent : shape) bytes *= extent.get<std::int64_t>();
  return bytes;
}

/// Recorded events in the form in which ours are: workspaces in bytes, without questions and where output lies.
void expected_events(const Json& line, Json& events, Json& questions) {
  events = questions = Json::array();
  for (const Json& event : line.at("events")) {
    if (event[0] == "workspace_shapes") {
      questions.push_back(event[1]);
      continue;
    }
    Json copy = event;
    if (event[0] == "apply") {
      copy[1]["workspace13_bytes"] = f32_bytes(event[1].at("workspace13"));
      copy[1]["workspace2_bytes"] = f32_bytes(event[1].at("workspace2"));
      for (const char* key : {"workspace13", "workspace2", "output_in"}) copy[1].erase(key);
    }
    events.push_back(copy);
  }
}

void compare_events(Differences& out, const Json& expected, const Json& got) {
  for (std::size_t i = 0; i < std::max(expected.size(), got.size()); ++i) {
    const std::string where = "event " + std::to_string(i);
    compare(out, where, i < expected.size() ? expected[i] : Json("nothing"), i < got.size() ? got[i] : Json("nothing"));
  }
}

/// 256-byte-aligned, poisoned, with a guard behind it.
struct Workspace {
  explicit Workspace(std::size_t size) : bytes(size), memory(size + kGuard + kWorkspaceAlignment, std::byte{0xff}) {
    void* at = memory.data();
    std::size_t space = memory.size();
    data = static_cast<std::byte*>(std::align(kWorkspaceAlignment, size + kGuard, at, space));
  }
  bool guard_intact() const {
    for (std::size_t i = 0; i < kGuard; ++i)
      if (data[bytes + i] != std::byte{0xff}) return false;
    return true;
  }
  std::size_t bytes;
  std::vector<std::byte> memory;
  std::byte* data = nullptr;
};

Json run(Scene& scene, const Json& line, Differences& differences) {
  const Json& config = line.at("config");
  const bool has_shared = config.at("shared");
  std::shared_ptr<SharedExperts> shared;
  if (has_shared) shared = std::make_shared<RecordingShared>(scene);
  const auto experts = std::make_shared<RecordingExperts>(scene);
  const Problem problem = scene.problem();
  const ModularKernel kernel(std::make_shared<Dispatcher>(scene), experts, shared, problem,
                             {.chunk = config.at("chunk")});

  QuantTensors tensors;
  const auto scale2_rows = static_cast<std::int64_t>(scene.scale2.size());
  if (scene.a2_scale != "none") tensors.a2_scale = Tensor(scene.scale2.data(), DType::f32, {scale2_rows, 1});
  const QuantConfig quant(problem.quant, tensors);
  std::byte no_weights[64] = {};
  KernelInput in;
  in.hidden = Tensor(scene.hidden.data(), DType::f32, {scene.M, scene.K});
  in.routing = scene.caller_routing();
  in.weights = {&experts->preferred_format(problem.weights), problem.weights, no_weights, 0};
  in.quant = &quant;
  in.num_experts = config.at("G_is_minus_one") ? -1 : scene.G;
  in.expert_map = scene.has_map() ? &scene.map_tensor : nullptr;
  in.weight_on_input = config.at("on_input");
  in.in_place = config.at("inplace");

  std::vector<float> output(scene.hidden.size()), shared_output(scene.hidden.size());
  KernelOutput out;
  out.output = Tensor(output.data(), DType::f32, {scene.M, scene.K});
  if (has_shared) out.shared = Tensor(shared_output.data(), DType::f32, {scene.M, scene.K});
  RecordingUbatch ubatch(scene);
  const Workspace workspace(kernel.workspace_bytes(scene.M));
  CallContext context;
  context.workspace = {workspace.data, workspace.bytes};
  context.ubatch = &ubatch;

  const Status status = kernel.forward(in, out, context);
  compare(differences, "bytes behind the workspace", "untouched", workspace.guard_intact() ? "untouched" : "written");
  if (status.code() == StatusCode::unsupported) return {{"error", "refused"}};
  if (!status.ok()) return {{"error", status.to_string()}};
  return {{"returns", has_shared ? "shared, output" : "output"},
          {"output_is_input", out.output.data == in.hidden.data}};
}

}  // namespace

Differences replay_kernel(const Json& line) {
  Differences differences;
  Scene scene(line);
  const Json result = run(scene, line, differences);
  Json events, questions;
  expected_events(line, events, questions);
  compare_events(differences, events, scene.events);
  std::set<std::string> asked;
  for (const Json& question : scene.questions) asked.insert(question.dump());
  for (const Json& question : questions)
    if (!asked.count(question.dump())) differences.push_back({"workspace question", question.dump(), "never asked"});
  compare(differences, "result", line.at("result"), result);
  return differences;
}

namespace {

/// Tensors of a converter case live here.
struct OutputCase {
  std::vector<std::vector<std::byte>> memory;
  Tensor make(DType type, const std::vector<std::int64_t>& shape, bool strided = false) {
    std::int64_t count = 1;
    for (std::int64_t extent : shape) count *= extent;
    memory.emplace_back(static_cast<std::size_t>(count * bytes(type)) + 64);
    void* data = memory.back().data();
    if (shape.size() == 1) return Tensor(data, type, {shape[0]});
    if (shape.size() == 3) return Tensor(data, type, {shape[0], shape[1], shape[2]});
    return strided ? Tensor(data, type, {shape[1], shape[0]}).transposed() : Tensor(data, type, {shape[0], shape[1]});
  }
};

void layout_case(const Json& what, OutputCase& memory, std::vector<Tensor>& given, bool& is_list, Tensor& destination) {
  const Tensor finalised = memory.make(DType::f32, {4, 8});
  const std::string kind = what.at("given");
  is_list = kind != "tensor";
  if (kind == "tensor" || kind == "list1") given = {finalised};
  if (kind == "list2") given = {finalised, finalised};
  if (kind == "list3")
    given = {memory.make(DType::f32, {10, 8}), memory.make(DType::f32, {4, 2}), memory.make(DType::i32, {4, 2})};
  const std::string target = what.at("destination");
  if (target == "same") destination = finalised;
  if (target == "other buffer") destination = memory.make(DType::f32, {4, 8});
  if (target == "other shape") destination = memory.make(DType::f32, {4, 9});
  if (target == "other dtype") destination = memory.make(DType::bf16, {4, 8});
}

void deferred_case(const Json& what, OutputCase& memory, std::vector<Tensor>& given) {
  const std::string strided = what.value("contiguous", "all");
  const DType map_type = what.value("map_dtype", "i32") == "i64" ? DType::i64 : DType::i32;
  given = {memory.make(DType::f32, what.at("gemm2"), strided == "gemm2 strided"),
           memory.make(DType::f32, what.at("weights"), strided == "weights strided"),
           memory.make(map_type, what.at("map"), strided == "map strided")};
}

}  // namespace

Differences replay_output(const Json& line) {
  const Json& what = line.at("case");
  OutputCase memory;
  std::vector<Tensor> given;
  bool is_list = true;
  Tensor destination;
  if (line.at("name") == "layout")
    layout_case(what, memory, given, is_list, destination);
  else
    deferred_case(what, memory, given);
  std::variant<Tensor, UnfinalizedOutput> out;
  const Status status = normalize_output({given, is_list}, what.at("do_finalize"), what.at("num_tokens"),
                                         what.at("top_k"), destination, out);
  Differences differences;
  Json result;
  if (status.ok())
    result = {{"ok", std::holds_alternative<Tensor>(out) ? "finalized" : "unfinalized"}};
  else
    result = {{"error", true}};
  compare(differences, "result", line.at("result"), result);
  if (!status.ok() && status.message().size() < 20)
    differences.push_back({"message", "a sentence that names the clause", status.message()});
  return differences;
}

Differences replay_line(const Json& line, bool& known) {
  known = true;
  if (line.contains("config")) return replay_kernel(line);
  if (line.contains("case")) return replay_output(line);
  known = false;
  return {};
}

}  // namespace moekit::replay
