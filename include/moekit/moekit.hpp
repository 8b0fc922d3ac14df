// The C++ API: product level, checkpoints and the workspace pool. The rest of the kit has its own headers under
// moekit/kit/.
#pragma once
#include <moekit/checkpoint.hpp>
#include <moekit/config.hpp>
#include <moekit/kit/workspace.hpp>
#include <moekit/layer.hpp>
#include <moekit/plan.hpp>
#include <moekit/status.hpp>
#include <moekit/stream.hpp>
#include <moekit/tensor.hpp>
#include <moekit/version.hpp>
#include <moekit/weights.hpp>
