#include "experts/cpu/forward.hpp"

#include <cstring>
#include <type_traits>

#include "cpu/isa.hpp"
#include "experts/call.hpp"
#include "experts/cpu/panels.hpp"

namespace moekit::cpu {
namespace {

Element element_of(DType type) {
  switch (type) {
    case DType::bf16: return Element::bf16;
    case DType::f16: return Element::f16;
    case DType::e4m3: return Element::e4m3;
    case DType::i8: return Element::i8;
    default: return Element::f32;
  }
}

/// body(thread) on `count` threads.
template <class Body>
void parallel(Executor& executor, std::int64_t count, const Body& body) {
  executor.run(
      count, [](void* arg, std::int64_t i) { (*static_cast<const Body*>(arg))(i); }, const_cast<Body*>(&body));
}

ActKind act_kind(ActivationKind kind) {
  switch (kind) {
    case ActivationKind::silu: return ActKind::silu;
    case ActivationKind::gelu: return ActKind::gelu;
    case ActivationKind::gelu_tanh: return ActKind::gelu_tanh;
    case ActivationKind::swigluoai: return ActKind::swigluoai;
    case ActivationKind::relu2: return ActKind::relu2;
    case ActivationKind::none: return ActKind::none;
  }
  return ActKind::none;
}

class Call {
 public:
  Call(const Unit& unit, const Sizes& sizes, const Workspace& ws, const ExpertsArgs& args, Executor& executor)
      : unit_(unit), s_(sizes), ws_(ws), args_(args), executor_(executor) {
    const Activation& act = args.activation;
    act_.kind = act_kind(act.kind);
    act_.gated = act.gated;
    act_.alpha = act.alpha;
    act_.beta = act.beta;
    act_.clamp_gate = act.clamp_gate;
    act_.clamp_up = act.clamp_up;
    const DType h = args.quant ? args.quant->spec().a2.type : args.activations.data.dtype;
    act_.round = is_float(h) ? element_of(h) : Element::f32;
  }

  void run() {
    if (s_.batched)
      run_batched();
    else
      run_standard();
  }

 private:
  void run_standard();
  void run_batched();
  void sort_routes(std::int64_t t0, std::int64_t t1);
  void turn();
  std::int64_t threads_for_turn() const;

  /// GEMM1, and GEMM2 of batched experts: (segment, panel) pairs in one line, cut so that threads do equal work on
  /// long stretches of weights. job(segment, first panel, last panel).
  template <class Job>
  void share(std::int64_t thread, std::int64_t panels, const Job& job) const;
  static std::int64_t cost(std::int64_t rows) { return 2 + std::max<std::int64_t>(rows, 6); }

  void first_gemm(std::int64_t thread);
  void first_gemm_rows(const Segment& segment, PanelJob job, std::int64_t row0);
  void gather(const Segment& segment, const PanelJob& job, std::int64_t row0, ThreadScratch& scratch) const;
  void store_h(const Segment& segment, std::int64_t row0, std::int64_t rows, std::int64_t panel, const float* c) const;
  void quantise_h(std::int64_t thread);
  void second_gemm_standard(std::int64_t thread);
  void second_gemm_batched(std::int64_t thread);
  PanelJob second_job(const Segment& segment, const ThreadScratch& scratch) const;
  /// The panel of the segment after the i-th, or null.
  const char* weights_after(std::int64_t i, std::int64_t panel) const {
    if (i + 1 >= num_segments_) return nullptr;
    const PanelLayout& l = s_.expert.w2;
    return reinterpret_cast<const char*>(args_.weights.expert(ws_.segments[i + 1].expert) + l.weights) +
           panel * l.panel_bytes();
  }
  void clear_padding(std::int64_t thread) const;
  void reduce(const ThreadScratch& scratch, std::int64_t first_panel, std::int64_t last_panel) const;

  std::int64_t token_of(std::int64_t position) const { return t0_ + ws_.order[position] / s_.top_k; }
  RowLayout laid_out(const RowLayout& layout, std::int64_t rows) const {
    RowLayout out = layout;
    out.kc = std::max<std::int64_t>(1, block_of(unit_, layout, rows));
    return out;
  }
  std::int64_t panel_group(const RowLayout& layout, std::int64_t rows) const {
    if (rows == 1) return unit_.streams;
    return rows <= unit_.stream_rows || rows * layout.row_bytes() * 8 <= caches().l2 ? 1 : kPanelGroup;
  }
  /// Rows of a segment in blocks of equal size, whole register tiles.
  std::int64_t row_step(std::int64_t rows) const {
    const std::int64_t blocks = (rows + s_.row_block - 1) / s_.row_block;
    const std::int64_t step = (rows + blocks - 1) / blocks, tile = unit_.max_rows;
    return std::min(s_.row_block, (step + tile - 1) / tile * tile);
  }

  const Unit& unit_;
  const Sizes& s_;
  const Workspace& ws_;
  const ExpertsArgs& args_;
  Executor& executor_;
  ActArgs act_;
  std::int64_t num_segments_ = 0, num_rows_ = 0, threads_ = 1;
  std::int64_t t0_ = 0, t1_ = 0;  // tokens of this turn
};

// ---- turns -----------------------------------------------------------------------------------------------------

void Call::run_standard() {
  const std::int64_t tokens = args_.routing.num_tokens(), step = std::max<std::int64_t>(1, s_.max_rows / s_.top_k);
  for (std::int64_t t0 = 0; t0 < tokens; t0 += step) {
    sort_routes(t0, std::min(tokens, t0 + step));
    turn();
  }
}

void Call::run_batched() {
  const Tensor& counts = args_.tokens->counts;
  const std::int64_t capacity = args_.activations.data.shape[1];
  auto rows_of = [&](std::int64_t e) {
    return std::clamp<std::int64_t>(counts.as<const std::int32_t>()[e * counts.stride[0]], 0, capacity);
  };
  auto flush = [&] {
    if (num_segments_ > 0) turn();
    num_segments_ = num_rows_ = 0;
  };
  for (std::int64_t e = 0; e < s_.num_local; ++e)
    for (std::int64_t at = 0, rows = rows_of(e); at < rows;) {
      const std::int64_t take = std::min(rows - at, s_.max_rows - num_rows_);
      ws_.segments[num_segments_++] = {e, num_rows_, take, at};
      num_rows_ += take;
      at += take;
      if (num_rows_ == s_.max_rows) flush();
    }
  flush();
  threads_ = s_.threads;
  parallel(executor_, threads_, [this](std::int64_t thread) { clear_padding(thread); });
}

/// Counting sort of the tokens' routes by local expert, ascending route within one.
void Call::sort_routes(std::int64_t t0, std::int64_t t1) {
  t0_ = t0;
  t1_ = t1;
  const Tensor& ids = args_.routing.ids;
  const std::int64_t k = ids.shape[1];
  auto slot_of = [&](std::int64_t t, std::int64_t j) {
    return experts::local_slot(ids.at<const std::int32_t>(t, j), args_);
  };
  std::fill_n(ws_.begin, s_.num_local + 1, 0);
  for (std::int64_t t = t0; t < t1; ++t)
    for (std::int64_t j = 0; j < k; ++j)
      if (const std::int64_t slot = slot_of(t, j); slot >= 0) ++ws_.begin[slot + 1];
  num_segments_ = num_rows_ = 0;
  for (std::int64_t e = 0; e < s_.num_local; ++e) {
    const std::int64_t rows = ws_.begin[e + 1];
    if (rows > 0) ws_.segments[num_segments_++] = {e, num_rows_, rows, 0};
    ws_.begin[e + 1] = static_cast<std::int32_t>(num_rows_);  // becomes the cursor of e
    num_rows_ += rows;
  }
  for (std::int64_t t = t0; t < t1; ++t)
    for (std::int64_t j = 0; j < k; ++j)
      if (const std::int64_t slot = slot_of(t, j); slot >= 0)
        ws_.order[ws_.begin[slot + 1]++] = static_cast<std::int32_t>((t - t0) * k + j);
}

/// Threads cost a microsecond: tiny calls stay on the caller's.
std::int64_t Call::threads_for_turn() const {
  const std::int64_t bytes = num_segments_ * (s_.expert.w1.panels * s_.expert.w1.panel_bytes() +
                                              s_.expert.w2.panels * s_.expert.w2.panel_bytes());
  return bytes * (4 + num_rows_ / std::max<std::int64_t>(1, num_segments_)) < (64 << 10) ? 1 : s_.threads;
}

void Call::turn() {
  threads_ = threads_for_turn();
  parallel(executor_, threads_, [this](std::int64_t thread) { first_gemm(thread); });
  if (s_.quantised_h) parallel(executor_, threads_, [this](std::int64_t thread) { quantise_h(thread); });
  if (s_.batched)
    parallel(executor_, threads_, [this](std::int64_t thread) { second_gemm_batched(thread); });
  else
    parallel(executor_, threads_, [this](std::int64_t thread) { second_gemm_standard(thread); });
}

template <class Job>
void Call::share(std::int64_t thread, std::int64_t panels, const Job& job) const {
  std::int64_t total = 0;
  for (std::int64_t i = 0; i < num_segments_; ++i) total += panels * cost(ws_.segments[i].rows);
  const std::int64_t from = total * thread / threads_, to = total * (thread + 1) / threads_;
  std::int64_t at = 0;
  for (std::int64_t i = 0; i < num_segments_ && at < to; ++i) {
    const std::int64_t each = cost(ws_.segments[i].rows);
    // a panel belongs to the thread in whose range its middle lies
    auto panel_at = [&](std::int64_t limit) {
      return std::clamp<std::int64_t>((2 * (limit - at) + each) / (2 * each), 0, panels);
    };
    const std::int64_t first = from <= at ? 0 : panel_at(from), last = panel_at(to);
    if (first < last) job(ws_.segments[i], first, last);
    at += panels * each;
  }
}

// ---- GEMM1 -----------------------------------------------------------------------------------------------------

void Call::first_gemm(std::int64_t thread) {
  const ThreadScratch scratch = scratch_of(s_, ws_, thread);
  share(thread, s_.expert.w1.panels, [&](const Segment& segment, std::int64_t first, std::int64_t last) {
    PanelJob job;
    job.unit = &unit_;
    job.gemm = s_.gemm;
    job.layout = &s_.expert.w1;
    job.expert = args_.weights.expert(segment.expert);
    job.first_panel = first;
    job.last_panel = last;
    job.scratch = scratch;
    const std::int64_t step = row_step(segment.rows);
    for (std::int64_t row0 = 0; row0 < segment.rows; row0 += step) {
      job.rows = std::min(step, segment.rows - row0);
      first_gemm_rows(segment, job, row0);
    }
  });
}

void Call::first_gemm_rows(const Segment& segment, PanelJob job, std::int64_t row0) {
  job.rows_layout = laid_out(s_.rows1, job.rows);
  job.a_rows = job.rows;
  job.a = job.scratch.a;
  job.group = panel_group(s_.rows1, job.rows);
  if (args_.activations.scale.present()) {
    job.a_scale = job.scratch.a_scale;
    job.a_scale_stride = std::max<std::int64_t>(1, s_.expert.w1.groups);
  }
  gather(segment, job, row0, job.scratch);
  multiply_panels(job, [&](std::int64_t panel, const float* c) { store_h(segment, row0, job.rows, panel, c); });
}

/// Rows of the segment as the kernels read them, zero beyond K.
void Call::gather(const Segment& segment, const PanelJob& job, std::int64_t row0, ThreadScratch& scratch) const {
  const Tensor& x = args_.activations.data;
  const Tensor& scale = args_.activations.scale;
  const RowLayout& l = job.rows_layout;
  const std::int64_t K = s_.hidden, groups = job.a_scale_stride;
  const Element type = element_of(x.dtype);
  const std::int64_t bytes = moekit::bytes(x.dtype);
  for (std::int64_t r = 0; r < job.rows; ++r) {
    auto offset = [&](const Tensor& t) {
      return s_.batched ? segment.expert * t.stride[0] + (segment.source + row0 + r) * t.stride[1]
                        : token_of(segment.first + row0 + r) * t.stride[0];
    };
    const auto* row = static_cast<const std::byte*>(x.data) + offset(x) * bytes;
    for (std::int64_t kb = 0; kb * l.kc < l.width; ++kb) {
      const std::int64_t k0 = kb * l.kc, width = std::min(l.kc, l.width - k0), n = std::min(width, K - k0);
      std::byte* out = scratch.a + block_offset(l, job.a_rows, kb) + r * block_stride(l, kb);
      if (s_.gemm == Gemm::i8)
        unit_.pack_i8(reinterpret_cast<const std::int8_t*>(row) + k0, n, out);
      else if (s_.gemm == Gemm::bf16_dot)
        std::memcpy(out, row + k0 * bytes, static_cast<std::size_t>(n * bytes));
      else
        unit_.widen(row + k0 * bytes, type, n, reinterpret_cast<float*>(out));
      if (s_.gemm != Gemm::i8) std::memset(out + n * l.element, 0, static_cast<std::size_t>((width - n) * l.element));
    }
    if (!scale.present()) continue;
    const bool one = scale.numel() == 1;
    const float* given = scale.as<const float>() + (one ? 0 : offset(scale));
    const std::int64_t step = one ? 0 : scale.stride[scale.rank - 1];
    for (std::int64_t g = 0; g < groups; ++g) scratch.a_scale[r * groups + g] = given[g * step];
  }
}

void Call::store_h(const Segment& segment, std::int64_t row0, std::int64_t rows, std::int64_t panel,
                   const float* c) const {
  const bool codes = s_.gemm == Gemm::i8, narrow = s_.gemm == Gemm::bf16_dot;
  const std::int64_t columns = act_.gated ? kHalfPanel : kPanelColumns, column = panel * columns;
  const RowLayout l = laid_out(codes ? s_.h : s_.rows2, segment.rows);
  const std::int64_t kb = column / l.kc, stride = block_stride(l, kb);
  std::byte* base = codes ? ws_.h : ws_.rows2;
  std::byte* out = base + segment.first * l.row_bytes() + block_offset(l, segment.rows, kb) + row0 * stride +
                   (column - kb * l.kc) * l.element;
  ActArgs act = act_;
  act.c = c;
  act.rows = rows;
  act.valid = static_cast<int>(std::min(columns, s_.intermediate - column));
  if (!narrow) {
    act.h = reinterpret_cast<float*>(out);
    act.ldh = stride / 4;
    unit_.activate(act);
    return;
  }
  act.h = const_cast<float*>(c);  // the first columns of the same row: each row is read before it is written
  act.ldh = kPanelColumns;
  unit_.activate(act);
  for (std::int64_t r = 0; r < rows; ++r) unit_.narrow(c + r * kPanelColumns, columns, out + r * stride, Element::bf16);
}

// ---- the second activation -------------------------------------------------------------------------------------

/// Per row (int8) or per group of 128 (e4m3), as quant/quantise.hpp says.
void Call::quantise_h(std::int64_t thread) {
  const bool int8 = s_.gemm == Gemm::i8;
  const std::int64_t from = num_rows_ * thread / threads_, to = num_rows_ * (thread + 1) / threads_;
  const std::int64_t groups = std::max<std::int64_t>(1, s_.expert.w2.groups);
  const ThreadScratch scratch = scratch_of(s_, ws_, thread);
  auto* codes = reinterpret_cast<std::int8_t*>(scratch.c);
  for (std::int64_t i = 0; i < num_segments_; ++i) {
    const Segment& segment = ws_.segments[i];
    const RowLayout h = laid_out(int8 ? s_.h : s_.rows2, segment.rows), out = laid_out(s_.rows2, segment.rows);
    const std::int64_t begin = std::max(from, segment.first), end = std::min(to, segment.first + segment.rows);
    for (std::int64_t at = begin; at < end; ++at) {
      const std::int64_t r = at - segment.first;
      const quant::RowScheme scheme =
          experts::h_scheme(args_, segment.expert, s_.batched ? segment.source + r : token_of(at));
      auto row_of = [&](std::byte* base, const RowLayout& l, std::int64_t k) {
        const std::int64_t kb = k / l.kc;
        return base + segment.first * l.row_bytes() + block_offset(l, segment.rows, kb) + r * block_stride(l, kb) +
               (k - kb * l.kc) * l.element;
      };
      auto unit_of = [&](std::uint32_t bits) {
        if (scheme.static_scale > 0) return quant::UnitScale{scheme.static_scale, 0.0f, false};
        quant::Absmax absmax;
        absmax.add(std::bit_cast<float>(bits));
        return quant::unit_scale(absmax, int8 ? scheme.int8_divisor : quant::kE4m3Largest);
      };
      if (!int8) {
        for (std::int64_t g = 0; g < groups; ++g) {
          const std::int64_t k0 = g * kScaleGroup, n = std::min<std::int64_t>(kScaleGroup, h.width - k0);
          auto* x = reinterpret_cast<float*>(row_of(ws_.rows2, h, k0));
          const quant::UnitScale unit = unit_of(unit_.absmax(x, n));
          ws_.scale2[at * groups + g] = unit.scale;
          if (unit.all_zero)
            std::fill_n(x, n, 0.0f);
          else
            unit_.quantise_e4m3(x, n, unit.scale);
        }
        continue;
      }
      std::uint32_t bits = 0;
      for (std::int64_t k0 = 0; k0 < h.width; k0 += h.kc)
        bits = std::max(
            bits, unit_.absmax(reinterpret_cast<const float*>(row_of(ws_.h, h, k0)), std::min(h.kc, h.width - k0)));
      const quant::UnitScale unit = unit_of(bits);
      ws_.scale2[at] = unit.scale;
      const bool divide = scheme.static_scale > 0 || scheme.int8_divisor != 127.0f;
      const float factor = unit.all_zero ? 0.0f : divide ? unit.scale : unit.multiplier;
      const float lowest = scheme.int8_divisor == 127.0f ? -127.0f : -128.0f;
      constexpr std::int64_t kStep = 512;  // codes pass through scratch: 512 fit into one row block of C, always
      for (std::int64_t k0 = 0; k0 < h.width; k0 += kStep) {
        const std::int64_t n = std::min(kStep, h.width - k0);
        const auto* x = reinterpret_cast<const float*>(row_of(ws_.h, h, k0));
        if (unit.all_zero)
          std::fill_n(codes, n, std::int8_t{0});
        else
          unit_.quantise_i8(x, n, factor, divide, lowest, codes);
        unit_.pack_i8(codes, n, row_of(ws_.rows2, out, k0));
      }
    }
  }
}

// ---- GEMM2 -----------------------------------------------------------------------------------------------------

PanelJob Call::second_job(const Segment& segment, const ThreadScratch& scratch) const {
  PanelJob job;
  job.unit = &unit_;
  job.gemm = s_.gemm;
  job.layout = &s_.expert.w2;
  job.expert = args_.weights.expert(segment.expert);
  job.rows_layout = laid_out(s_.rows2, segment.rows);
  job.a = ws_.rows2 + segment.first * s_.rows2.row_bytes();
  job.a_rows = segment.rows;
  job.scratch = scratch;
  if (s_.quantised_h) job.a_scale_stride = std::max<std::int64_t>(1, s_.expert.w2.groups);
  return job;
}

/// Threads own output columns. Partial sums of all routes over a chunk of them, then each token's slots in order.
void Call::second_gemm_standard(std::int64_t thread) {
  const ThreadScratch scratch = scratch_of(s_, ws_, thread);
  const std::int64_t panels = s_.expert.w2.panels;
  const std::int64_t from = panels * thread / threads_, to = panels * (thread + 1) / threads_;
  const std::int64_t slots = (t1_ - t0_) * s_.top_k;
  const std::int64_t chunk =
      std::max<std::int64_t>(1, s_.chunk_bytes / (std::max<std::int64_t>(1, slots) * kPanelColumns * 4));
  for (std::int64_t p0 = from; p0 < to; p0 += chunk) {
    const std::int64_t p1 = std::min(to, p0 + chunk), ld = (p1 - p0) * kPanelColumns;
    for (std::int64_t i = 0; i < num_segments_; ++i) {
      const Segment& segment = ws_.segments[i];
      PanelJob job = second_job(segment, scratch);
      job.first_panel = p0;
      job.last_panel = p1;
      const std::int64_t step = row_step(segment.rows);
      for (job.row0 = 0; job.row0 < segment.rows; job.row0 += step) {
        job.rows = std::min(step, segment.rows - job.row0);
        job.group = panel_group(s_.rows2, job.rows);
        job.after = weights_after(i, p0);
        if (s_.quantised_h) job.a_scale = ws_.scale2 + (segment.first + job.row0) * job.a_scale_stride;
        const std::int32_t* route = ws_.order + segment.first + job.row0;
        multiply_panels(job, [&](std::int64_t panel, const float* c) {
          for (std::int64_t r = 0; r < job.rows; ++r)
            std::memcpy(scratch.partial + route[r] * ld + (panel - p0) * kPanelColumns, c + r * kPanelColumns,
                        kPanelColumns * sizeof(float));
        });
      }
    }
    reduce(scratch, p0, p1);
  }
}

void Call::reduce(const ThreadScratch& scratch, std::int64_t first_panel, std::int64_t last_panel) const {
  const Tensor& ids = args_.routing.ids;
  const Tensor& out = args_.output;
  const std::int64_t k = ids.shape[1], ld = (last_panel - first_panel) * kPanelColumns;
  const std::int64_t column = first_panel * kPanelColumns;
  ReduceArgs r;
  r.rows = scratch.rows;
  r.weights = args_.weight_on_input ? nullptr : scratch.weights;
  r.n = std::min(ld, s_.hidden - column);
  r.type = element_of(out.dtype);
  for (std::int64_t t = t0_; t < t1_; ++t) {
    r.count = 0;
    for (std::int64_t j = 0; j < k; ++j) {
      if (experts::local_slot(ids.at<const std::int32_t>(t, j), args_) < 0) continue;
      scratch.rows[r.count] = scratch.partial + ((t - t0_) * k + j) * ld;
      if (r.weights) scratch.weights[r.count] = args_.routing.weights.at<const float>(t, j);
      ++r.count;
    }
    r.out = static_cast<std::byte*>(out.data) + (t * out.stride[0] + column) * moekit::bytes(out.dtype);
    unit_.reduce(r);
  }
}

void Call::second_gemm_batched(std::int64_t thread) {
  const ThreadScratch scratch = scratch_of(s_, ws_, thread);
  const Tensor& out = args_.output;
  const Element type = element_of(out.dtype);
  share(thread, s_.expert.w2.panels, [&](const Segment& segment, std::int64_t first, std::int64_t last) {
    PanelJob job = second_job(segment, scratch);
    job.first_panel = first;
    job.last_panel = last;
    const std::int64_t step = row_step(segment.rows);
    for (job.row0 = 0; job.row0 < segment.rows; job.row0 += step) {
      job.rows = std::min(step, segment.rows - job.row0);
      job.group = panel_group(s_.rows2, job.rows);
      if (s_.quantised_h) job.a_scale = ws_.scale2 + (segment.first + job.row0) * job.a_scale_stride;
      multiply_panels(job, [&](std::int64_t panel, const float* c) {
        const std::int64_t column = panel * kPanelColumns,
                           n = std::min<std::int64_t>(kPanelColumns, s_.hidden - column);
        for (std::int64_t r = 0; r < job.rows; ++r) {
          const std::int64_t row = segment.source + job.row0 + r;
          const std::int64_t at = segment.expert * out.stride[0] + row * out.stride[1] + column;
          unit_.narrow(c + r * kPanelColumns, n, static_cast<std::byte*>(out.data) + at * moekit::bytes(out.dtype),
                       type);
        }
      });
    }
  });
}

/// Every element of the output is written: rows beyond an expert's count become zero.
void Call::clear_padding(std::int64_t thread) const {
  const Tensor& counts = args_.tokens->counts;
  const Tensor& out = args_.output;
  const std::int64_t capacity = out.shape[1], total = s_.num_local * capacity;
  const std::int64_t from = total * thread / threads_, to = total * (thread + 1) / threads_;
  const auto bytes = static_cast<std::size_t>(moekit::bytes(out.dtype));
  for (std::int64_t at = from; at < to; ++at) {
    const std::int64_t e = at / capacity, row = at % capacity;
    if (row < counts.as<const std::int32_t>()[e * counts.stride[0]]) continue;
    std::memset(
        static_cast<std::byte*>(out.data) + static_cast<std::size_t>(e * out.stride[0] + row * out.stride[1]) * bytes,
        0, static_cast<std::size_t>(s_.hidden) * bytes);
  }
}

}  // namespace

void forward(const Unit& unit, const Sizes& sizes, const Workspace& workspace, const ExpertsArgs& args,
             Executor& executor) {
  Call(unit, sizes, workspace, args, executor).run();
}

}  // namespace moekit::cpu
