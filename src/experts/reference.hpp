#pragma once
#include <memory>

#include <moekit/kit/implementations.hpp>

namespace moekit::experts {

std::unique_ptr<Experts> make_reference(const MakeContext& context);
std::unique_ptr<Experts> make_open_reference(const MakeContext& context);
std::unique_ptr<Experts> make_open_cpu(const MakeContext& context);
std::unique_ptr<Experts> make_naive_batched(const MakeContext& context);

}  // namespace moekit::experts
