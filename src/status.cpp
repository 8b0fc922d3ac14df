#include <moekit/status.hpp>

namespace moekit::inline v0 {

struct Status::Detail {
  StatusCode code;
  std::string message, hint, field;
};

namespace {
const std::string kEmpty;
}

const char* name(StatusCode code) {
  switch (code) {
    case StatusCode::ok: return "ok";
    case StatusCode::invalid_argument: return "invalid_argument";
    case StatusCode::invalid_shape: return "invalid_shape";
    case StatusCode::invalid_dtype: return "invalid_dtype";
    case StatusCode::unsupported: return "unsupported";
    case StatusCode::workspace_too_small: return "workspace_too_small";
    case StatusCode::bad_file: return "bad_file";
    case StatusCode::out_of_memory: return "out_of_memory";
    case StatusCode::device_error: return "device_error";
    case StatusCode::aborted: return "aborted";
    case StatusCode::internal: return "internal";
  }
  return "unknown";
}

Status::Status(StatusCode code, std::string message, std::string hint, std::string field)
    : detail_(code == StatusCode::ok ? nullptr
                                     : std::make_shared<const Detail>(
                                           Detail{code, std::move(message), std::move(hint), std::move(field)})) {}

StatusCode Status::code() const { return detail_ ? detail_->code : StatusCode::ok; }
const std::string& Status::message() const { return detail_ ? detail_->message : kEmpty; }
const std::string& Status::hint() const { return detail_ ? detail_->hint : kEmpty; }
const std::string& Status::field() const { return detail_ ? detail_->field : kEmpty; }

std::string Status::to_string() const {
  if (ok()) return "ok";
  std::string out = std::string(name(detail_->code)) + ": " + detail_->message;
  if (!detail_->hint.empty()) out += " (" + detail_->hint + ")";
  return out;
}

Error::Error(Status status) : std::runtime_error(status.to_string()), status_(std::move(status)) {}
Error::Error(StatusCode code, std::string message, std::string hint, std::string field)
    : Error(Status(code, std::move(message), std::move(hint), std::move(field))) {}

void throw_if_failed(const Status& status) {
  if (!status.ok()) throw Error(status);
}

}  // namespace moekit::inline v0
