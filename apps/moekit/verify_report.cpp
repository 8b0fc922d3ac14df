#include "verify_report.hpp"

#include "console.hpp"
#include "json.hpp"

namespace moekit::cli {

Check Check::of(std::string module, std::string name, std::string impl, const Comparison& found) {
  Check out;
  out.module = std::move(module);
  out.name = std::move(name);
  out.impl = std::move(impl);
  out.max_abs = found.max_abs;
  out.max_rel = found.max_rel;
  out.tol = found.tol;
  out.t = found.t;
  out.c = found.c;
  out.ok = found.ok;
  if (!found.ok) out.note = found.text();
  return out;
}

Check Check::skip(std::string module, std::string name, std::string impl, std::string why) {
  Check out;
  out.module = std::move(module);
  out.name = std::move(name);
  out.impl = std::move(impl);
  out.skipped = why.empty() ? "no reason given" : std::move(why);
  return out;
}

void VerifyReport::add(const Check& check) {
  const bool skipped = !check.skipped.empty();
  ++(skipped ? skipped_ : check.ok ? passed_ : failed_);
  if (json_) {
    Json record = Json::object().set("module", check.module).set("case", check.name).set("impl", check.impl);
    if (skipped) {
      record.set("ok", Json()).set("skipped", check.skipped);
    } else {
      record.set("max_abs", check.max_abs).set("max_rel", check.max_rel).set("tol", check.tol);
      record.set("worst", Json::array().push(check.t).push(check.c)).set("ok", check.ok);
      if (!check.note.empty()) record.set("note", check.note);
    }
    print(record.dump());
    return;
  }
  auto padded = [](std::string text, std::size_t to) {
    if (width(text) < to) text.append(to - width(text), ' ');
    return text;
  };
  const std::string head =
      padded(check.module, 20) + "  " + padded(check.name, 30) + "  " + padded(check.impl, 16) + "  ";
  if (skipped)
    print("skip  " + head + check.skipped);
  else if (check.ok)
    print("ok    " + head + format("%.1e  (bound %.1e)", check.max_rel, check.tol));
  else
    print("FAIL  " + head + check.note);
}

Exit VerifyReport::finish() const {
  if (!json_)
    print(format("%lld passed, %lld failed, %lld skipped", static_cast<long long>(passed_),
                 static_cast<long long>(failed_), static_cast<long long>(skipped_)));
  if (failed_ > 0) return Exit::check_failed;
  return passed_ > 0 ? Exit::ok : Exit::unsupported;
}

}  // namespace moekit::cli
