// Status, Error and Verdict: how every part of moekit says what went wrong and what to change.
#pragma once
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

#include <moekit/export.hpp>

namespace moekit::inline v0 {

/// What kind of thing failed. The text says which thing, with the values of both sides.
enum class StatusCode {
  ok,
  invalid_argument,     ///< null pointer, k > E, a value out of its range, stages that do not fit each other
  invalid_shape,        ///< rank, extent or stride
  invalid_dtype,        ///< element type
  unsupported,          ///< legal, but no implementation here can do it
  workspace_too_small,  ///< fewer bytes than workspace_bytes() asked for, or a locked pool that would have to grow
  bad_file,             ///< a checkpoint, pack or array file that is malformed or incomplete
  out_of_memory,
  device_error,  ///< the run-time of a device, or a fault that a kernel reported
  aborted,       ///< another micro-batch or rank failed
  internal,      ///< a bug in moekit
};

/// "ok", "invalid_shape", …: stable names.
MOEKIT_API const char* name(StatusCode code);

/// The result of a call that may fail without throwing (forward, hooks, receivers). Success carries nothing and
/// allocates nothing; a failure carries a message, a hint that says what to change, and the field that is to blame.
class [[nodiscard]] Status {
 public:
  Status() = default;
  /// @param message  "[experts] w1 must be [8, 28672, 4096], got [8, 14336, 4096]": stage in brackets, both sides
  /// @param hint     what to change; may be empty
  /// @param field    path of the argument or configuration entry to blame ("quant.w1.type"); may be empty
  MOEKIT_API Status(StatusCode code, std::string message, std::string hint = {}, std::string field = {});

  bool ok() const { return detail_ == nullptr; }
  explicit operator bool() const { return ok(); }
  MOEKIT_API StatusCode code() const;
  MOEKIT_API const std::string& message() const;
  MOEKIT_API const std::string& hint() const;
  MOEKIT_API const std::string& field() const;
  /// "invalid_shape: message (hint)"
  MOEKIT_API std::string to_string() const;

 private:
  struct Detail;
  std::shared_ptr<const Detail> detail_;  // null = ok
};

/// What construction (Plan::create, Weights::pack, Checkpoint::open, …) throws.
class MOEKIT_API Error : public std::runtime_error {
 public:
  explicit Error(Status status);
  Error(StatusCode code, std::string message, std::string hint = {}, std::string field = {});
  const Status& status() const { return status_; }
  StatusCode code() const { return status_.code(); }

 private:
  Status status_;
};

/// Throws Error if `status` is a failure.
MOEKIT_API void throw_if_failed(const Status& status);

/// Yes, or no with a sentence that says why ("weights must be bf16, got mxfp4"). "Yes" means correct for every
/// routing of the problem asked about, not for the average one; speed is estimate_us()'s business.
class [[nodiscard]] Verdict {
 public:
  static Verdict yes() { return Verdict{}; }
  static Verdict no(std::string reason) { return Verdict(std::move(reason)); }
  bool ok() const { return ok_; }
  explicit operator bool() const { return ok_; }
  const std::string& reason() const { return reason_; }  ///< empty only for yes

 private:
  Verdict() = default;
  explicit Verdict(std::string reason) : ok_(false), reason_(std::move(reason)) {}
  bool ok_ = true;
  std::string reason_;
};

}  // namespace moekit::inline v0
