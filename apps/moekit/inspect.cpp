// moekit inspect: what a checkpoint holds, and what runs it here.
#include <moekit/plan.hpp>

#include "console.hpp"
#include "json.hpp"
#include "subject.hpp"
#include "verbs.hpp"

namespace moekit::cli {
namespace {

/// Consecutive layers of one configuration.
struct Group {
  std::int64_t first, last, count;
  LayerConfig config;
  std::int64_t bytes;
};

std::vector<Group> grouped(const std::vector<SubjectLayer>& layers) {
  std::vector<Group> out;
  for (const SubjectLayer& layer : layers) {
    if (!out.empty() && out.back().config == layer.config && out.back().bytes == layer.stored_bytes) {
      out.back().last = layer.index;
      ++out.back().count;
    } else {
      out.push_back({layer.index, layer.index, 1, layer.config, layer.stored_bytes});
    }
  }
  return out;
}

std::string range(const Group& group) {
  return group.first == group.last ? std::to_string(group.first)
                                   : std::to_string(group.first) + "–" + std::to_string(group.last);
}

std::string shared_text(const LayerConfig& config) {
  if (config.shared.intermediate == 0) return "–";
  return std::to_string(config.shared.intermediate) + (config.shared.sigmoid_gate ? " gated" : "");
}

double bytes_per_token(const LayerConfig& config) {
  return static_cast<double>(config.top_k) * expert_bytes(config) + shared_bytes(config);
}

/// What the plan says for one token and for many; or why nothing runs.
struct Support {
  bool ok = false;
  std::string reason;
  std::string one, many;  // experts implementations
  double one_us = 0;
};

Support support_of(const LayerConfig& config) {
  Support out;
  try {
    PlanOptions options;
    options.max_tokens = 512;
    const Plan plan = Plan::create(Device{}, config, options);
    out.ok = true;
    out.one = plan.bucket(1).experts;
    out.many = plan.bucket(512).experts;
    out.one_us = plan.bucket(1).estimate_us;
  } catch (const Error& error) {
    out.reason = error.status().message();
  }
  return out;
}

Json record(const SubjectLayer& layer, const Support& support) {
  const LayerConfig& config = layer.config;
  Json runs = Json::object().set("device", "cpu").set("ok", support.ok);
  if (support.ok)
    runs.set("experts_1", support.one).set("experts_512", support.many).set("estimate_us_1", support.one_us);
  else
    runs.set("reason", support.reason);
  return Json::object()
      .set("layer", layer.index)
      .set("module", layer.module)
      .set("shape", shape_string(config))
      .set("experts", config.num_experts)
      .set("top_k", config.top_k)
      .set("hidden", config.hidden)
      .set("intermediate", config.intermediate)
      .set("weights", weights_scheme(config.quant))
      .set("activations", activations_scheme(config.quant))
      .set("dtype", name(config.dtype))
      .set("activation", to_string(config.activation))
      .set("router", to_string(config.router))
      .set("shared", config.shared.intermediate)
      .set("bytes", layer.stored_bytes)
      .set("bytes_per_token", bytes_per_token(config))
      .set("runs", runs);
}

}  // namespace

Exit run_inspect(const InspectArgs& args) {
  const Subject subject = Subject::open_checkpoint(args.directory);
  const std::vector<SubjectLayer> layers = subject.layers();
  const Checkpoint& checkpoint = *subject.checkpoint();
  const std::vector<Group> groups = grouped(layers);
  for (const SubjectLayer& layer : layers)  // scales are values that must be looked at: a bad one is found here
    if (layer.config.quant.weights_quantised()) static_cast<void>(checkpoint.source(layer.index));
  std::vector<Support> support;
  for (const Group& group : groups) support.push_back(support_of(group.config));

  if (args.json) {
    Json list = Json::array();
    std::size_t g = 0;
    for (const SubjectLayer& layer : layers) {
      while (layer.index > groups[g].last) ++g;
      list.push(record(layer, support[g]));
    }
    print(Json::object()
              .set("schema", "moekit.inspect/1")
              .set("directory", checkpoint.directory())
              .set("model_type", checkpoint.model_type())
              .set("family", checkpoint.family())
              .set("layers", list)
              .dump());
    return Exit::ok;
  }

  double bytes = 0, per_token = 0;
  Table table(
      {"layer", "experts", "top-k", "hidden", "inter", "weights", "router", "shared", "a layer", "a token reads"});
  for (const Group& group : groups) {
    const LayerConfig& config = group.config;
    table.row({range(group), std::to_string(config.num_experts), std::to_string(config.top_k),
               std::to_string(config.hidden), std::to_string(config.intermediate), weights_scheme(config.quant),
               to_string(config.router), shared_text(config), format_bytes(static_cast<double>(group.bytes)),
               format_bytes(bytes_per_token(config))});
    bytes += static_cast<double>(group.bytes * group.count);
    per_token += bytes_per_token(config) * static_cast<double>(group.count);
  }
  print(format("%s: %s, %zu MoE layers, %s of expert weights, %s read for each token (mapped, nothing loaded)\n",
               subject.text().c_str(), checkpoint.model_type().c_str(), layers.size(), format_bytes(bytes).c_str(),
               format_bytes(per_token).c_str()));
  print(table.text());
  print("\nruns here");
  for (std::size_t g = 0; g < groups.size(); ++g) {
    const Support& s = support[g];
    if (s.ok)
      print(format("  layer %s  cpu  ok: %s for 1 token (about %s a layer), %s for 512", range(groups[g]).c_str(),
                   s.one.c_str(), format_us(s.one_us).c_str(), s.many.c_str()));
    else
      print(format("  layer %s  cpu  no: %s", range(groups[g]).c_str(), s.reason.c_str()));
  }
  return Exit::ok;
}

}  // namespace moekit::cli
