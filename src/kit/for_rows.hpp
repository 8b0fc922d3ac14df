// Rows spread over the executor of a stream. Each row is done by one thread, so bits never depend on the cut.
#pragma once
#include <algorithm>

#include <moekit/stream.hpp>

namespace moekit::kit {

inline Executor& executor_of(const Stream& stream) { return stream.executor ? *stream.executor : cpu_executor(); }

/// body(begin, end) for disjoint ranges that cover [0, rows): one range for each thread, or one for all where the work
/// is not worth waking others.
template <class Body>
void cut_rows(const Stream& stream, std::int64_t rows, bool worth_sharing, Body&& body) {
  if (rows <= 0) return;
  if (rows == 1 || !worth_sharing) return body(std::int64_t{0}, rows);
  Executor& executor = executor_of(stream);
  struct Job {
    Body& body;
    std::int64_t rows, slabs;
  } job{body, rows, std::clamp<std::int64_t>(executor.concurrency(), 1, rows)};
  executor.run(
      job.slabs,
      [](void* arg, std::int64_t i) {
        const Job& j = *static_cast<Job*>(arg);
        j.body(j.rows * i / j.slabs, j.rows * (i + 1) / j.slabs);
      },
      &job);
}

/// The same; waking others costs more than copying `bytes_per_row` bytes of a few rows.
template <class Body>
void for_rows(const Stream& stream, std::int64_t rows, std::int64_t bytes_per_row, Body&& body) {
  constexpr std::int64_t kWorthSharing = 128 * 1024;
  cut_rows(stream, rows, rows * bytes_per_row >= kWorthSharing, body);
}

}  // namespace moekit::kit
