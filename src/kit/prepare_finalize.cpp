#include <moekit/kit/prepare_finalize.hpp>

#include "text.hpp"

namespace moekit::inline v0 {

namespace {
Status no_async(std::string_view engine, const char* call) {
  return Status(StatusCode::unsupported, text::concat("[", call, "] ", engine, " is synchronous"),
                "ask supports_async() first, or call prepare and finalize");
}
}  // namespace

Status PrepareFinalize::prepare_async(const PrepareArgs&, Pending<Dispatched>&) {
  return no_async(name(), "prepare_async");
}
Status PrepareFinalize::finalize_async(const FinalizeArgs&, Pending<Nothing>&) {
  return no_async(name(), "finalize_async");
}

}  // namespace moekit::inline v0
