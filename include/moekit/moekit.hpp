// The C++ API: product level and checkpoints. The kit level has its own headers under moekit/kit/.
#pragma once
#include <moekit/checkpoint.hpp>
#include <moekit/config.hpp>
#include <moekit/layer.hpp>
#include <moekit/plan.hpp>
#include <moekit/status.hpp>
#include <moekit/stream.hpp>
#include <moekit/tensor.hpp>
#include <moekit/version.hpp>
#include <moekit/weights.hpp>
