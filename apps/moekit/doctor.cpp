// moekit doctor: the machine, what of it is used, what not and why.
#include <unistd.h>

#include <algorithm>

#include <moekit/kit/implementations.hpp>
#include <moekit/version.hpp>

#include "console.hpp"
#include "cpu/isa.hpp"
#include "cpu/threads.hpp"
#include "json.hpp"
#include "machine.hpp"
#include "probe.hpp"
#include "session.hpp"
#include "verbs.hpp"

namespace moekit::cli {
namespace {

struct Available {
  std::string stage, name;
  bool ok;
  std::string reason;
};

std::vector<Available> implementations() {
  std::vector<Available> out;
  for (const RouterEntry& entry : router_implementations()) {
    const Verdict verdict = entry.available();
    out.push_back({"router", std::string(entry.name), verdict.ok(), verdict.reason()});
  }
  for (const PrepareFinalizeEntry& entry : prepare_finalize_implementations())
    out.push_back({"prepare_finalize", std::string(entry.name), true, ""});
  for (const ExpertsEntry& entry : experts_implementations()) {
    const Verdict verdict = entry.available();
    out.push_back({"experts", std::string(entry.name), verdict.ok(), verdict.reason()});
  }
  return out;
}

struct Measured {
  double read_gbps = 0, fma_gflops = 0;
};

/// Best of a few slices: what the machine can do when nobody else is on it.
Measured measure_machine(const Machine& machine, Executor& executor) {
  Measured out;
  ReadProbe probe(executor, std::max<std::int64_t>(std::int64_t{256} << 20, 4 * machine.last_level_cache),
                  std::int64_t{64} << 20);
  Progress progress("measure", 12);
  for (int i = 0; i < 12; ++i) {
    out.read_gbps = std::max(out.read_gbps, probe.gbps());
    out.fma_gflops = std::max(out.fma_gflops, fma_gflops(executor));
    progress.step();
  }
  return out;
}

bool has_gpu() { return access("/dev/nvidiactl", F_OK) == 0; }

std::string why_no_gpu() {
  return has_gpu() ? "an NVIDIA driver is here, but this build has no CUDA module" : "no NVIDIA driver on this machine";
}
constexpr const char* kNoMpi = "this build has no MPI or NCCL module: one process, one rank";

Json record(const Machine& machine, const Measured& measured) {
  Json list = Json::array();
  for (const Available& one : implementations()) {
    Json entry = Json::object().set("stage", one.stage).set("name", one.name).set("available", one.ok);
    if (!one.ok) entry.set("reason", one.reason);
    list.push(entry);
  }
  const cpu::Caches& caches = cpu::caches();
  return Json::object()
      .set("schema", "moekit.doctor/1")
      .set("version", version())
      .set("compiler", compiler())
      .set("system", machine.system)
      .set("cpu", machine.cpu_model)
      .set("isa_detected", cpu::name(cpu::detected_isa()))
      .set("isa_used", cpu::name(cpu::usable_isa()))
      .set("cpus_online", machine.online_cpus)
      .set("cpus_allowed", cpu::affinity_cpus())
      .set("cgroup_quota_cpus", cpu::cgroup_quota_cpus())
      .set("threads", cpu::default_threads())
      .set("l1_bytes", caches.l1)
      .set("l2_bytes", caches.l2)
      .set("l3_bytes", machine.last_level_cache)
      .set("hugepages", machine.hugepages)
      .set("memory_bytes", machine.memory_bytes)
      .set("available_bytes", machine.available_bytes)
      .set("read_gbps", measured.read_gbps)
      .set("f32_fma_gflops", measured.fma_gflops)
      .set("cuda", Json::object().set("available", false).set("reason", why_no_gpu()))
      .set("mpi", Json::object().set("available", false).set("reason", kNoMpi))
      .set("implementations", list);
}

void print_text(const Machine& machine, const Measured& measured) {
  const cpu::Caches& caches = cpu::caches();
  const int quota = cpu::cgroup_quota_cpus();
  print(format("moekit %s, %s, built with %s", version(), machine.system.c_str(), compiler().c_str()));
  print("");
  print("CPU           " + machine.cpu_model);
  print(format("instructions  %s (processor and system offer %s%s)", cpu::name(cpu::usable_isa()),
               cpu::name(cpu::detected_isa()),
               cpu::usable_isa() == cpu::detected_isa() ? "" : "; capped by MOEKIT_CPU_ISA"));
  print(format("threads       %d (%d CPUs online, %d allowed, %s)", cpu::default_threads(), machine.online_cpus,
               cpu::affinity_cpus(), quota == 0 ? "no cgroup quota" : format("cgroup quota of %d", quota).c_str()));
  print(format(
      "caches        L1 %s, L2 %s a core, L3 %s", format_bytes(static_cast<double>(caches.l1)).c_str(),
      format_bytes(static_cast<double>(caches.l2)).c_str(),
      machine.last_level_cache > 0 ? format_bytes(static_cast<double>(machine.last_level_cache)).c_str() : "none"));
  print("huge pages    " + (machine.hugepages.empty() ? std::string("not offered") : machine.hugepages) +
        (machine.hugepages == "never" ? ": weights will lie in small pages, which costs bandwidth" : ""));
  print(format("memory        %s, %s free", format_bytes(static_cast<double>(machine.memory_bytes)).c_str(),
               format_bytes(static_cast<double>(machine.available_bytes)).c_str()));
  print(format("measured      %.1f GB/s read, %.0f GFLOP/s f32 multiply-add, all threads", measured.read_gbps,
               measured.fma_gflops));
  print("GPU           none: " + why_no_gpu());
  print(std::string("MPI, NCCL     none: ") + kNoMpi);
  print("");
  Table table({"stage", "implementation", "here"});
  for (const Available& one : implementations()) table.row({one.stage, one.name, one.ok ? "yes" : "no: " + one.reason});
  print(table.text());
}

}  // namespace

Exit run_doctor(const DoctorArgs& args) {
  const Machine machine = this_machine();
  const Measured measured = measure_machine(machine, executor_for(0));
  if (args.json)
    print(record(machine, measured).dump());
  else
    print_text(machine, measured);
  return Exit::ok;
}

}  // namespace moekit::cli
