// Shape strings, and that shapes/edge.txt holds every pair of edge sizes that can be held.
#include <gtest/gtest.h>

#include <array>
#include <set>

#include "shapes.hpp"

namespace moekit {
namespace {

ShapeString parsed(const char* text) {
  ShapeString shape;
  throw_if_failed(parse_shape(text, shape));
  return shape;
}
std::string refusal(const char* text) {
  ShapeString shape;
  return parse_shape(text, shape).message();
}

TEST(shapes, sizes_scheme_and_settings_are_read_and_printed_back) {
  const ShapeString shape = parsed("e128k8h2048i768:int8@tokens=1,16,512,routing=hot:2,0.5,threads=2");
  EXPECT_EQ(shape.config.num_experts, 128);
  EXPECT_EQ(shape.config.top_k, 8);
  EXPECT_EQ(shape.config.hidden, 2048);
  EXPECT_EQ(shape.config.intermediate, 768);
  EXPECT_EQ(shape.config.quant.a1.type, DType::i8);
  EXPECT_EQ(shape.config.dtype, DType::bf16);
  EXPECT_EQ(shape.settings.at("tokens"), "1,16,512");
  EXPECT_EQ(shape.settings.at("routing"), "hot:2,0.5");
  EXPECT_EQ(to_string(shape), "e128k8h2048i768:int8@routing=hot:2,0.5,threads=2,tokens=1,16,512");
  EXPECT_EQ(to_string(parsed(to_string(shape).c_str())), to_string(shape));
}

TEST(shapes, without_a_scheme_it_is_bf16_and_float_schemes_set_the_type_of_the_rows) {
  EXPECT_EQ(to_string(parsed("e8k2h64i96")), "e8k2h64i96:bf16");
  EXPECT_EQ(parsed("e8k2h64i96:f16").config.dtype, DType::f16);
  EXPECT_EQ(parsed("e8k2h64i96@weights=int8,activations=bf16").config.quant.w1.type, DType::i8);
}

TEST(shapes, more_slots_than_the_router_takes_are_routed_outside) {
  EXPECT_EQ(parsed("e512k512h1i1").config.router.source, RouterSource::external);
  EXPECT_EQ(parsed("e512k64h1i1").config.router.source, RouterSource::logits);
}

TEST(shapes, refusals_name_the_piece_that_is_wrong) {
  EXPECT_NE(refusal("8k2h64i96").find("expected 'e' and a number, found '8'"), std::string::npos);
  EXPECT_NE(refusal("e8k2h64").find("expected 'i' and a number, found the end"), std::string::npos);
  EXPECT_NE(refusal("e8k2h64i96x").find("'x' is left over"), std::string::npos);
  EXPECT_NE(refusal("e8k0h64i96").find("'k' needs a number of at least 1"), std::string::npos);
  EXPECT_NE(refusal("e99999999999999999999k1h1i1").find("'e' needs a number"), std::string::npos);
  EXPECT_NE(refusal("e8k9h64i96").find("top_k"), std::string::npos);
  EXPECT_NE(refusal("e8k2h64i96:int3").find("fp8_block128"), std::string::npos);
  EXPECT_NE(refusal("e8k2h64i96@tokns=3").find("no setting 'tokns'; there are: tokens"), std::string::npos);
  EXPECT_NE(refusal("e8k2h64i96@3").find("'3' must be key=value"), std::string::npos);
  EXPECT_NE(refusal("e8k2h64i96@seed=1,seed=2").find("set twice"), std::string::npos);
  ShapeLine line;
  EXPECT_FALSE(parse_shape_line("e8k2h64i96 M=x", line).ok());
  EXPECT_FALSE(parse_shape_line("e8k2h64i96 N=3", line).ok());
}

std::vector<ShapeLine> read(const char* file) {
  std::vector<ShapeLine> lines;
  throw_if_failed(read_shapes(std::string(MOEKIT_SOURCE_DIR "/shapes/") + file, lines));
  return lines;
}

TEST(shapes, every_file_parses) {
  EXPECT_EQ(read("smoke.txt").size(), 6u);
  EXPECT_EQ(read("models.txt").size(), 8u);
  for (const ShapeLine& line : read("smoke.txt")) EXPECT_GT(line.tokens, 0);
  for (const ShapeLine& line : read("models.txt")) {
    const LayerConfig& c = line.shape.config;
    EXPECT_LE(c.num_experts * 3 * c.hidden * c.intermediate * 2, std::int64_t{6} << 30) << to_string(line.shape);
  }
}

/// M, E, k, K, I; k as a kind: 0 = 1, 1 = 2, 2 = E/2, 3 = E.
using Row = std::array<std::int64_t, 5>;
constexpr std::int64_t kValues[5][5] = {
    {0, 1, 2, 33, 1000}, {1, 2, 8, 128, 512}, {0, 1, 2, 3}, {1, 17, 64, 2880}, {1, 17, 64, 2880}};
constexpr int kCounts[5] = {5, 5, 4, 4, 4};

std::int64_t top_k(const Row& row) {
  const std::int64_t E = row[1];
  return std::array<std::int64_t, 4>{1, 2, E / 2, E}[static_cast<std::size_t>(row[2])];
}
bool fits(const Row& row) {
  const std::int64_t matrices = 3 * row[3] * row[4], k = top_k(row);
  return k >= 1 && k <= row[1] && 2 * row[1] * matrices <= (std::int64_t{64} << 20) &&
         2 * row[0] * k * matrices <= 2'000'000'000;
}
using Pair = std::array<std::int64_t, 4>;  // parameter, value, parameter, value
void add_pairs(const Row& row, std::set<Pair>& pairs) {
  for (int a = 0; a < 5; ++a)
    for (int b = a + 1; b < 5; ++b)  // rows of no tokens count for their pairs with M only
      if (a == 0 || row[0] > 0)
        pairs.insert({a, row[static_cast<std::size_t>(a)], b, row[static_cast<std::size_t>(b)]});
}

TEST(shapes, edge_file_holds_every_pair_that_the_limits_allow) {
  std::set<Pair> possible, held;
  int index[5]{};
  for (bool more = true; more;) {
    Row row;
    for (int a = 0; a < 5; ++a) row[static_cast<std::size_t>(a)] = kValues[a][index[a]];
    if (fits(row)) add_pairs(row, possible);
    int a = 0;
    while (a < 5 && ++index[a] == kCounts[a]) index[a++] = 0;
    more = a < 5;
  }
  for (const ShapeLine& line : read("edge.txt")) {
    const LayerConfig& c = line.shape.config;
    bool known = false;
    for (std::int64_t kind = 0; kind < 4; ++kind) {
      const Row row{line.tokens, c.num_experts, kind, c.hidden, c.intermediate};
      if (top_k(row) != c.top_k) continue;
      known = true;
      EXPECT_TRUE(fits(row)) << to_string(line.shape);
      add_pairs(row, held);
    }
    EXPECT_TRUE(known) << to_string(line.shape);
  }
  // All pairs but E = 1 with k = 2 and with k = E/2, which need more experts than there are.
  EXPECT_EQ(possible.size(), 5u * 5 + 5 * 4 * 3 + 5 * 4 * 3 + 4 * 4 * 3 - 2);
  for (const Pair& p : possible)
    EXPECT_TRUE(held.count(p)) << "parameter " << p[0] << " = " << p[1] << ", parameter " << p[2] << " = " << p[3];
}

}  // namespace
}  // namespace moekit
