// The checks of moekit verify, as they are made.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "exit_code.hpp"
#include "oracle.hpp"

namespace moekit::cli {

/// One line: (module, case, impl) is unique.
struct Check {
  std::string module;  ///< module path, or the shape string
  std::string name;    ///< "M37 experts bf16": the case
  std::string impl;
  double max_abs = 0, max_rel = 0, tol = 0;
  std::int64_t t = 0, c = 0;  ///< worst element
  bool ok = false;
  std::string hash;     ///< not empty: of the bits that were compared, FNV-1a 64
  std::string note;     ///< on failure: what was found
  std::string skipped;  ///< not empty: why there was nothing to check
  std::string refused;  ///< not empty: why the implementation said no to it: listed, and counted nowhere

  static Check of(std::string module, std::string name, std::string impl, const Comparison& found);
  static Check skip(std::string module, std::string name, std::string impl, std::string why);
  static Check refuse(std::string module, std::string name, std::string impl, std::string why);
};

class VerifyReport {
 public:
  explicit VerifyReport(bool json) : json_(json) {}
  void add(const Check& check);
  /// Checks of one kind: one line of text if all are ok. Records are the same as with add.
  void add_all(const std::vector<Check>& checks, const std::string& kind);
  /// Prints the last line (text form) and decides.
  Exit finish() const;
  std::int64_t failed() const { return failed_; }
  std::int64_t passed() const { return passed_; }

 private:
  void count(const Check& check);
  void show(const Check& check) const;
  void show_record(const Check& check) const;
  bool json_;
  std::int64_t passed_ = 0, failed_ = 0, skipped_ = 0;
};

}  // namespace moekit::cli
