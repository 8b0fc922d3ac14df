// Router implementations of the list, called by name: what run and verify show of a layer's routing.
#pragma once
#include <string>

#include <moekit/kit/implementations.hpp>
#include <moekit/weights.hpp>

#include "routing_spec.hpp"

namespace moekit::cli {

/// logits f32 [M, E] of the layer's router matrix.
Buffer router_logits(const Tensor& hidden, const RouterTensors& tensors, std::int64_t num_experts);
/// Ids and weights that implementation `name` makes of logits. Throws Error: unknown, unavailable, or refused.
RoutingRows route_with(const std::string& name, const Tensor& logits, const LayerConfig& config,
                       const RouterTensors& tensors);
/// Why a router cannot run here or does not take this layer.
Verdict router_verdict(const RouterEntry& entry, const LayerConfig& config, std::int64_t num_tokens);

}  // namespace moekit::cli
