// Sizes, routing, counts, pending results, workspace pool, open output.
#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "support/kit_doubles.hpp"
#include "support/random.hpp"

namespace moekit::testing {
namespace {

bool says(const Status& status, std::initializer_list<const char*> words) {
  for (const char* word : words)
    if (status.message().find(word) == std::string::npos) return ADD_FAILURE() << status.message(), false;
  return !status.ok();
}

Tensor shape_of(std::initializer_list<std::int64_t> shape, DType type = DType::f32) {
  static std::byte memory[64];
  return Tensor(memory, type, shape);
}

TEST(kit_problem, sizes_come_from_activations_spec_and_ids_never_from_packed_extents) {
  const WeightsSpec spec{.num_local = 3, .hidden = 16, .intermediate = 20, .gated = true};
  ProblemSize size;
  ASSERT_TRUE(ProblemSize::from(shape_of({5, 16}), spec, shape_of({5, 2}), size).ok());
  EXPECT_EQ(size, (ProblemSize{3, 5, 40, 16, 2}));
  WeightsSpec ungated = spec;
  ungated.gated = false;
  ASSERT_TRUE(ProblemSize::from(shape_of({3, 7, 16}), ungated, shape_of({5, 2}), size).ok());
  EXPECT_EQ(size, (ProblemSize{3, 7, 20, 16, 2}));  // batched: M = T*D
}

TEST(kit_problem, every_mismatch_names_both_numbers) {
  const WeightsSpec spec{.num_local = 3, .hidden = 16, .intermediate = 20};
  ProblemSize size;
  EXPECT_TRUE(says(ProblemSize::from(shape_of({5, 17}), spec, shape_of({5, 2}), size), {"17", "16"}));
  EXPECT_TRUE(says(ProblemSize::from(shape_of({5, 16}), spec, shape_of({6, 2}), size), {"5", "6"}));
  EXPECT_TRUE(says(ProblemSize::from(shape_of({4, 7, 16}), spec, shape_of({5, 2}), size), {"4", "3"}));
  EXPECT_TRUE(says(ProblemSize::from(shape_of({16}), spec, shape_of({5, 2}), size), {"[16]"}));
  EXPECT_TRUE(says(ProblemSize::from(shape_of({5, 16}), spec, shape_of({5}), size), {"[5]"}));
}

TEST(kit_problem, strings_say_what_matters) {
  Case c(4, 16, 2, 8, 4);
  EXPECT_EQ(to_string(c.problem), "e8k2h16i4:bf16 M=4 L=4");
  EXPECT_EQ(to_string(InputSpec{.dtype = DType::i8, .granularity = {1, -1}, .int8_divisor = 127.5f}),
            "int8 per row, absmax/127.5");
  EXPECT_EQ(to_string(InputSpec{.dtype = DType::f32}), "f32");
  EXPECT_STREQ(name(ActivationFormat::batched_experts), "batched_experts");
}

TEST(kit_routing, validate_names_the_array_and_both_sides) {
  Case c(3, 4, 2, 5);
  EXPECT_TRUE(validate(c.routing(), 3).ok());
  EXPECT_TRUE(says(validate(c.routing(), 4), {"ids", "[4,", "[3, 2]"}));
  Routing wrong = c.routing();
  wrong.ids.dtype = DType::i16;
  EXPECT_TRUE(says(validate(wrong, 3), {"i32, i64 or u32", "i16"}));
  wrong = c.routing();
  wrong.weights.dtype = DType::bf16;
  EXPECT_TRUE(says(validate(wrong, 3), {"f32", "bf16"}));
  wrong = c.routing();
  wrong.weights.shape[1] = 1;
  EXPECT_TRUE(says(validate(wrong, 3), {"k = 2", "k = 1"}));
  wrong = c.routing();
  wrong.ids = Tensor(c.ids.data(), DType::i32, {2, 3}).transposed();
  EXPECT_TRUE(says(validate(wrong, 3), {"side by side", "stride 3"}));
  wrong = c.routing();
  wrong.ids.data = nullptr;
  EXPECT_TRUE(says(validate(wrong, 3), {"null"}));
}

TEST(kit_routing, topk_id_out_of_range_counts_nowhere_and_reads_nothing) {
  // the map stands at the end of its memory: reading behind it is seen by the sanitizer
  const std::vector<std::int32_t> map = {0, -1, 1, 7};
  const Tensor map_tensor(map.data(), DType::i32, {4});
  const std::vector<std::int32_t> ids = {0, 2, 4, 4 + 7, 0x7fffffff, -0x7fffffff - 1, -1, 3, 1, 0};
  std::vector<std::int32_t> counts(2, 99);
  ASSERT_TRUE(count_expert_tokens(Tensor(ids.data(), DType::i32, {5, 2}), &map_tensor, counts).ok());
  EXPECT_EQ(counts, (std::vector<std::int32_t>{2, 1}));
  ASSERT_TRUE(count_expert_tokens(Tensor(ids.data(), DType::i32, {5, 2}), nullptr, counts).ok());
  EXPECT_EQ(counts, (std::vector<std::int32_t>{2, 1}));
}

TEST(kit_routing, count_vector_equals_a_host_histogram_for_odd_numbers_of_experts) {
  Random random(3);
  for (std::int64_t E : {1, 3, 5, 9, 33, 127, 129, 160, 200}) {
    std::vector<std::int32_t> ids(513 * 3), wanted(static_cast<std::size_t>(E)), counts(wanted.size());
    for (auto& id : ids) {
      id = static_cast<std::int32_t>(random.below(E + 1)) - 1;
      if (id >= 0) ++wanted[static_cast<std::size_t>(id)];
    }
    ASSERT_TRUE(count_expert_tokens(Tensor(ids.data(), DType::i32, {513, 3}), nullptr, counts).ok());
    EXPECT_EQ(counts, wanted) << E;
  }
}

TEST(kit_routing, wide_ids_are_converted_without_wrapping) {
  const std::vector<std::int64_t> wide = {3, -1, (1ll << 32) + 3, -2, 9, 10};
  std::vector<std::int32_t> narrow(6, 77);
  const Tensor out(narrow.data(), DType::i32, {3, 2});
  ASSERT_TRUE(convert_ids(Tensor(wide.data(), DType::i64, {3, 2}), 10, out).ok());
  EXPECT_EQ(narrow, (std::vector<std::int32_t>{3, -1, -1, -1, 9, -1}));
  const std::vector<std::uint32_t> unsigned_ids = {3, 0xffffffffu, 0x80000003u, 10, 9, 0};
  ASSERT_TRUE(convert_ids(Tensor(unsigned_ids.data(), DType::u32, {3, 2}), 10, out).ok());
  EXPECT_EQ(narrow, (std::vector<std::int32_t>{3, -1, -1, -1, 9, 0}));
}

TEST(kit_routing, checked_ids_name_value_row_and_slot) {
  const std::vector<std::int32_t> ids = {0, 3, -1, 4};
  EXPECT_TRUE(check_ids(Tensor(ids.data(), DType::i32, {2, 2}), 5).ok());
  EXPECT_TRUE(says(check_ids(Tensor(ids.data(), DType::i32, {2, 2}), 4), {"id 4", "row 1", "slot 1", "[-1, 4)"}));
}

TEST(kit_routing, counts_from_host_are_copied_so_the_source_may_go) {
  ExpertTokens tokens;
  {
    std::vector<std::int32_t> source = {4, 0, 2};
    tokens = ExpertTokens::from_host(source, {}, {});
    std::fill(source.begin(), source.end(), -7);
  }
  const ExpertTokens copy = tokens;
  tokens = {};
  EXPECT_EQ(copy.counts.as<std::int32_t>()[0], 4);
  EXPECT_EQ(copy.host[2], 2);
}

// ---- pending -------------------------------------------------------------------------------------------------------

struct Wire {
  int hooks = 0, received = 0, abandoned = 0;
  Pending<int> pending() {
    Pending<int>::Functions f;
    f.hook = [](void* s) { return ++static_cast<Wire*>(s)->hooks, Status(); };
    f.receive = [](void* s, int& out) { return out = 42, ++static_cast<Wire*>(s)->received, Status(); };
    f.abandon = [](void* s) { ++static_cast<Wire*>(s)->abandoned; };
    return Pending<int>(f, this);
  }
};

TEST(kit_pending, destroyed_unreceived_abandons_exactly_once) {
  Wire wire;
  {
    Pending<int> a = wire.pending();
    Pending<int> b = std::move(a);
    Pending<int> c;
    c = std::move(b);
    EXPECT_FALSE(a.valid());  // NOLINT: moved-from is empty by contract
    EXPECT_TRUE(c.run_hook().ok());
  }
  EXPECT_EQ(wire.abandoned, 1);
  {
    Pending<int> replaced = wire.pending(), other = wire.pending();
    replaced = std::move(other);
    EXPECT_EQ(wire.abandoned, 2);
  }
  EXPECT_EQ(wire.abandoned, 3);
}

TEST(kit_pending, received_once_and_never_abandoned) {
  Wire wire;
  {
    Pending<int> pending = wire.pending();
    int value = 0;
    EXPECT_TRUE(pending.receive(value).ok());
    EXPECT_EQ(value, 42);
    EXPECT_EQ(pending.receive(value).code(), StatusCode::invalid_argument);
  }
  EXPECT_EQ(wire.received, 1);
  EXPECT_EQ(wire.abandoned, 0);
}

TEST(kit_pending, async_calls_on_a_synchronous_engine_are_unsupported) {
  const auto engine = make_dispatcher("single_rank");
  ASSERT_FALSE(engine->supports_async());
  Pending<Dispatched> rows;
  Pending<Nothing> done;
  EXPECT_EQ(engine->prepare_async({}, rows).code(), StatusCode::unsupported);
  EXPECT_EQ(engine->finalize_async({}, done).code(), StatusCode::unsupported);
  EXPECT_FALSE(rows.valid());
}

TEST(kit_ubatch, a_single_micro_batch_runs_its_own_hook_once) {
  SingleUbatch ubatch;
  int runs = 0;
  const auto hook = [](void* n) { return ++*static_cast<int*>(n), Status(); };
  EXPECT_FALSE(ubatch.enabled());
  EXPECT_TRUE(ubatch.register_recv_hook(hook, &runs).ok());
  EXPECT_EQ(runs, 0);
  EXPECT_TRUE(ubatch.register_recv_hook(hook, &runs).ok());  // the earlier wait is not lost
  EXPECT_EQ(runs, 1);
  EXPECT_TRUE(ubatch.maybe_run_recv_hook().ok());
  EXPECT_TRUE(ubatch.maybe_run_recv_hook().ok());
  EXPECT_EQ(runs, 2);
}

TEST(kit_ubatch, a_dropped_hook_never_runs_and_others_stay) {
  SingleUbatch ubatch;
  int runs = 0, other = 0;
  const auto hook = [](void* n) { return ++*static_cast<int*>(n), Status(); };
  ubatch.drop_recv_hook(&runs);  // nothing is registered
  ASSERT_TRUE(ubatch.register_recv_hook(hook, &runs).ok());
  ubatch.drop_recv_hook(&runs);
  EXPECT_TRUE(ubatch.maybe_run_recv_hook().ok());
  EXPECT_EQ(runs, 0);
  ASSERT_TRUE(ubatch.register_recv_hook(hook, &runs).ok());
  ubatch.drop_recv_hook(&other);
  EXPECT_TRUE(ubatch.maybe_run_recv_hook().ok());
  EXPECT_EQ(runs, 1);
}

// ---- workspace pool ------------------------------------------------------------------------------------------------

TEST(kit_workspace, locked_pool_refuses_to_grow_and_keeps_its_state) {
  WorkspacePool pool;
  Bytes first, again;
  ASSERT_TRUE(pool.get(0, 0, 1000, first).ok());
  std::memset(first.data, 0x42, 1000);
  pool.lock();
  const Status grown = pool.get(0, 0, 1001, again);
  EXPECT_EQ(grown.code(), StatusCode::workspace_too_small);
  EXPECT_TRUE(says(grown, {"1000", "1001", "ubatch 0"}));
  EXPECT_EQ(pool.bytes(), 1000u);
  ASSERT_TRUE(pool.get(0, 0, 1000, again).ok());
  EXPECT_EQ(again.data, first.data);
  EXPECT_EQ(again.data[999], std::byte{0x42});
  pool.unlock();
  EXPECT_TRUE(pool.get(0, 0, 1001, again).ok());
}

TEST(kit_workspace, second_ubatch_slot_is_ready_after_reserve_and_does_not_overlap) {
  WorkspacePool pool;
  ASSERT_TRUE(pool.reserve(2, 4096).ok());
  pool.lock();
  Bytes a, b;
  ASSERT_TRUE(pool.get(0, 0, 4096, a).ok());
  ASSERT_TRUE(pool.get(1, 0, 4096, b).ok());
  EXPECT_TRUE(a.data + a.size <= b.data || b.data + b.size <= a.data);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(b.data) % kWorkspaceAlignment, 0u);
  EXPECT_FALSE(pool.get(2, 0, 1, b).ok());
  EXPECT_FALSE(pool.get(8, 0, 1, b).ok());
  EXPECT_FALSE(pool.get(0, 2, 1, b).ok());
}

TEST(kit_workspace, two_threads_never_get_each_others_slot) {
  WorkspacePool pool;
  std::atomic<int> wrong{0};
  const auto work = [&](int slot) {
    for (int round = 1; round < 500; ++round) {
      Bytes mine;
      if (!pool.get(slot, 0, static_cast<std::size_t>(round) * 16, mine).ok()) ++wrong;
      std::memset(mine.data, slot + 1, static_cast<std::size_t>(round) * 16);
      for (int i = 0; i < round * 16; ++i)
        if (mine.data[i] != static_cast<std::byte>(slot + 1)) ++wrong;
    }
  };
  std::thread other(work, 1);
  work(0);
  other.join();
  EXPECT_EQ(wrong, 0);
}

TEST(kit_workspace, cursor_counts_what_it_hands_out) {
  WorkspaceCursor counting({});
  counting.take(1), counting.take(0), counting.take(257);
  EXPECT_EQ(counting.used(), 256u + 0 + 512);
  PoisonedBytes memory(counting.used());
  WorkspaceCursor cursor(memory.bytes());
  EXPECT_EQ(cursor.take(1).data, memory.bytes().data);
  EXPECT_EQ(cursor.take(0).data, memory.bytes().data + 256);
  EXPECT_EQ(cursor.take(257).data, memory.bytes().data + 256);
  EXPECT_TRUE(cursor.fits());
  EXPECT_EQ(cursor.take(1).data, nullptr);
  EXPECT_FALSE(cursor.fits());
}

// ---- open output ---------------------------------------------------------------------------------------------------

struct OpenCase {
  float rows[24], weights[4];
  std::int32_t map[4];
  Tensor gemm2{rows, DType::f32, {3, 8}}, w{weights, DType::f32, {4}}, m{map, DType::i32, {4}};
  Status run(bool do_finalize = false, std::int64_t M = 2, std::int64_t k = 2, Tensor destination = {}) {
    const Tensor list[] = {gemm2, w, m};
    return normalize_output({list}, do_finalize, M, k, destination, out);
  }
  std::variant<Tensor, UnfinalizedOutput> out;
};

TEST(kit_open_output, deferred_views_come_back_as_tokens_by_slots) {
  OpenCase c;
  ASSERT_TRUE(c.run().ok());
  const auto& open = std::get<UnfinalizedOutput>(c.out);
  EXPECT_EQ(shape_string(open.expert_weights), "[2, 2]");
  EXPECT_EQ(shape_string(open.expanded_to_permuted), "[2, 2]");
  EXPECT_EQ(open.expert_weights.data, c.weights);
}

TEST(kit_open_output, every_clause_is_named) {
  {
    OpenCase c;
    EXPECT_TRUE(says(c.run(false, -1), {"num_tokens", "-1"}));
  }
  {
    OpenCase c;
    EXPECT_TRUE(says(c.run(false, 2, 0), {"top_k", "0"}));
  }
  {
    OpenCase c;
    EXPECT_TRUE(says(c.run(true), {"exactly one", "3"}));
  }
  {
    OpenCase c;
    EXPECT_TRUE(says(c.run(false, 2, 2, c.gemm2), {"destination"}));
  }
  {
    OpenCase c;
    c.gemm2 = Tensor(c.rows, DType::f32, {24});
    EXPECT_TRUE(says(c.run(), {"rank 2", "[24]"}));
  }
  {
    OpenCase c;
    c.m.dtype = DType::i64;
    EXPECT_TRUE(says(c.run(), {"i32", "i64"}));
  }
  {
    OpenCase c;
    c.w.shape[0] = 3;
    EXPECT_TRUE(says(c.run(), {"weights", "= 4", "[3]"}));
  }
  {
    OpenCase c;
    c.m.shape[0] = 3;
    EXPECT_TRUE(says(c.run(), {"map", "= 4", "[3]"}));
  }
  {
    OpenCase c;
    c.m.device = {DeviceType::cuda, 1};
    EXPECT_TRUE(says(c.run(), {"device", "cuda:1"}));
  }
  {
    OpenCase c;
    c.gemm2.stride[0] = 9;
    EXPECT_TRUE(says(c.run(), {"GEMM2", "contiguous"}));
  }
  {
    OpenCase c;
    c.w.stride[0] = 2;
    EXPECT_TRUE(says(c.run(), {"weights", "contiguous"}));
  }
  {
    OpenCase c;
    c.m.stride[0] = 2;
    EXPECT_TRUE(says(c.run(), {"map", "contiguous"}));
  }
  {
    OpenCase c;
    std::variant<Tensor, UnfinalizedOutput> out;
    EXPECT_TRUE(says(normalize_output({{&c.w, 1}, false}, false, 2, 2, {}, out), {"list of three", "bare"}));
  }
  {
    OpenCase c;
    EXPECT_TRUE(says(c.run(false, std::int64_t{1} << 62, 4), {"do not fit"}));
  }
}

TEST(kit_open_output, a_finalised_output_aliases_its_destination_in_every_respect) {
  float a[8], b[8];
  std::variant<Tensor, UnfinalizedOutput> out;
  const Tensor result(a, DType::f32, {2, 4});
  const auto with = [&](const Tensor& destination) {
    return normalize_output({{&result, 1}, false}, true, 2, 2, destination, out);
  };
  EXPECT_TRUE(with({}).ok());
  EXPECT_TRUE(with(result).ok());
  EXPECT_EQ(std::get<Tensor>(out).data, a);
  EXPECT_TRUE(says(with(Tensor(b, DType::f32, {2, 4})), {"address"}));
  EXPECT_TRUE(says(with(Tensor(a, DType::f32, {4, 2})), {"shape", "[2, 4]", "[4, 2]"}));
  EXPECT_TRUE(says(with(Tensor(a, DType::i32, {2, 4})), {"type", "f32", "i32"}));
  EXPECT_TRUE(says(with(Tensor(a, DType::f32, {2, 4}, {DeviceType::cuda, 0})), {"device", "cpu", "cuda:0"}));
}

}  // namespace
}  // namespace moekit::testing
