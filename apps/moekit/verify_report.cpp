#include "verify_report.hpp"

#include "console.hpp"
#include "json.hpp"

namespace moekit::cli {

Check Check::of(std::string module, std::string name, std::string impl, const Comparison& found) {
  Check out;
  out.module = std::move(module);
  out.name = std::move(name);
  out.impl = std::move(impl);
  out.max_abs = found.worst_abs;
  out.max_rel = found.worst_rel;
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

Check Check::refuse(std::string module, std::string name, std::string impl, std::string why) {
  Check out = skip(std::move(module), std::move(name), std::move(impl), std::move(why));
  std::swap(out.skipped, out.refused);
  out.refused = out.refused.substr(0, out.refused.find('\n'));
  return out;
}

void VerifyReport::count(const Check& check) {
  if (check.refused.empty()) ++(!check.skipped.empty() ? skipped_ : check.ok ? passed_ : failed_);
}

void VerifyReport::add(const Check& check) {
  count(check);
  show(check);
}

void VerifyReport::add_all(const std::vector<Check>& checks, const std::string& kind) {
  bool all_ok = !checks.empty();
  for (const Check& check : checks) {
    count(check);
    all_ok = all_ok && check.ok && check.skipped.empty() && check.refused.empty();
  }
  if (all_ok && !json_) {
    Check one = checks.front();
    one.name = kind;
    show(one);
    return;
  }
  for (const Check& check : checks) show(check);
}

void VerifyReport::show_record(const Check& check) const {
  Json record = Json::object().set("module", check.module).set("case", check.name).set("impl", check.impl);
  if (!check.skipped.empty()) {
    record.set("ok", Json()).set("skipped", check.skipped);
  } else if (!check.refused.empty()) {
    record.set("ok", Json()).set("refused", check.refused);
  } else {
    record.set("max_abs", check.max_abs).set("max_rel", check.max_rel).set("tol", check.tol);
    record.set("worst", Json::array().push(check.t).push(check.c)).set("ok", check.ok);
    if (!check.hash.empty()) record.set("fnv1a64", check.hash);
    if (!check.note.empty()) record.set("note", check.note);
  }
  print(record.dump());
}

void VerifyReport::show(const Check& check) const {
  if (json_) return show_record(check);
  auto padded = [](std::string text, std::size_t to) {
    if (width(text) < to) text.append(to - width(text), ' ');
    return text;
  };
  const std::string head =
      padded(check.module, 18) + "  " + padded(check.name, 39) + "  " + padded(check.impl, 20) + "  ";
  if (!check.skipped.empty())
    print("skip  " + head + check.skipped);
  else if (!check.refused.empty())
    print("n/a   " + head + check.refused);
  else if (check.ok && !check.hash.empty())
    print("ok    " + head + "fnv1a64 " + check.hash);
  else if (check.ok)
    print("ok    " + head +
          (check.tol > 0 ? format("%.1e  (bound %.1e)", check.max_rel, check.tol) : std::string("equal")));
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
