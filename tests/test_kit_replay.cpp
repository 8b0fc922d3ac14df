// A replay that cannot fail proves nothing: every kind of mutation of a recorded line must be noticed.
#include <gtest/gtest.h>

#include <fstream>
#include <functional>

#include "replay/replay.hpp"

namespace moekit::replay {
namespace {

std::vector<Json> lines(const char* file) {
  std::ifstream in(std::string(MOEKIT_SOURCE_DIR "/tests/data/golden_trace/") + file);
  std::vector<Json> out;
  for (std::string text; std::getline(in, text);) out.push_back(Json::parse(text));
  return out;
}

bool agrees(const Json& line) {
  bool known = false;
  return replay_line(line, known).empty() && known;
}

/// Applies `mutate` (which says whether it could) to every line; each changed line must disagree. Returns how many.
int caught(const char* file, const std::function<bool(Json&)>& mutate) {
  int changed = 0;
  for (Json line : lines(file)) {
    EXPECT_TRUE(agrees(line)) << line["id"];
    if (!mutate(line)) continue;
    ++changed;
    EXPECT_FALSE(agrees(line)) << line["id"] << " still agrees: " << line.dump();
  }
  return changed;
}

Json* find(Json& line, const char* event) {
  for (Json& e : line["events"])
    if (e[0] == event) return &e[1];
  return nullptr;
}

TEST(kit_replay, two_swapped_events_are_noticed) {
  EXPECT_GT(caught("modular_kernel.jsonl",
                   [](Json& line) {
                     Json& events = line["events"];
                     for (std::size_t i = events.size(); i-- > 1;)
                       if (events[i] != events[i - 1] && events[i][0] != "workspace_shapes" &&
                           events[i - 1][0] != "workspace_shapes") {
                         std::swap(events[i], events[i - 1]);
                         return true;
                       }
                     return false;
                   }),
            30);
}

TEST(kit_replay, a_changed_row_range_is_noticed) {
  EXPECT_GT(caught("modular_kernel.jsonl",
                   [](Json& line) {
                     Json* apply = find(line, "apply");
                     if (!apply || !(*apply)["input_rows"].is_array()) return false;
                     (*apply)["input_rows"][1] = (*apply)["input_rows"][1].get<int>() + 1;
                     return true;
                   }),
            30);
}

TEST(kit_replay, a_dropped_or_added_event_is_noticed) {
  EXPECT_GT(caught("modular_kernel.jsonl",
                   [](Json& line) {
                     if (line["events"].empty()) return line["events"].push_back({"prepare", Json::object()}), true;
                     return line["events"].erase(line["events"].size() - 1), true;
                   }),
            70);
}

TEST(kit_replay, every_field_of_an_apply_counts) {
  for (const char* key : {"output_shape", "output_first_row", "ids_rows", "a1_scale", "a2_scale", "activation",
                          "global_num_experts", "meta", "workspace13", "workspace2", "weight_on_input"})
    EXPECT_GT(caught("modular_kernel.jsonl",
                     [key](Json& line) {
                       Json* apply = find(line, "apply");
                       if (!apply) return false;
                       Json& value = (*apply)[key];
                       if (value.is_number())
                         value = value.get<int>() + 1;
                       else if (value.is_boolean())
                         value = !value.get<bool>();
                       else if (value.is_array())
                         value[0] = value[0].get<int>() + 1;
                       else
                         value = "something else";
                       return true;
                     }),
              40)
        << key;
}

TEST(kit_replay, every_field_of_prepare_and_finalize_counts) {
  const std::vector<std::pair<const char*, const char*>> fields = {{"prepare", "rows"},
                                                                   {"prepare", "num_experts"},
                                                                   {"prepare", "expert_map"},
                                                                   {"prepare", "weight_on_input"},
                                                                   {"finalize", "output_rows"},
                                                                   {"finalize", "fused_shape"},
                                                                   {"finalize", "routing_rows"},
                                                                   {"finalize", "routing"},
                                                                   {"finalize", "weight_and_reduce"},
                                                                   {"shared_experts", "rows"}};
  for (const auto& [event, key] : fields)
    EXPECT_GT(caught("modular_kernel.jsonl",
                     [event, key](Json& line) {
                       Json* what = find(line, event);
                       if (!what) return false;
                       (*what)[key] = "something else";
                       return true;
                     }),
              20)
        << event << " " << key;
}

TEST(kit_replay, a_question_that_nobody_asked_and_a_wrong_result_are_noticed) {
  EXPECT_GT(caught("modular_kernel.jsonl",
                   [](Json& line) {
                     Json* question = find(line, "workspace_shapes");
                     return question && ((*question)["M"] = 12345, true);
                   }),
            40);
  EXPECT_GT(caught("modular_kernel.jsonl",
                   [](Json& line) {
                     if (line["result"].contains("error"))
                       return line["result"] = {{"returns", "output"}, {"output_is_input", false}}, true;
                     return line["result"]["output_is_input"] = !line["result"]["output_is_input"].get<bool>(), true;
                   }),
            70);
}

TEST(kit_replay, a_changed_configuration_is_noticed) {
  EXPECT_GT(caught("modular_kernel.jsonl",
                   [](Json& line) {
                     Json& config = line["config"];
                     if (line["result"].contains("error")) return false;
                     config["shared"] = !config["shared"].get<bool>();
                     return true;
                   }),
            60);
  EXPECT_GT(caught("normalize_output.jsonl",
                   [](Json& line) {
                     if (line["result"].contains("ok")) return line["result"] = {{"error", true}}, true;
                     return line["result"] = {{"ok", "unfinalized"}}, true;
                   }),
            40);
}

TEST(kit_replay, a_line_of_no_known_kind_is_not_counted_as_passed) {
  bool known = true;
  EXPECT_TRUE(replay_line({{"id", "x"}}, known).empty());
  EXPECT_FALSE(known);
}

}  // namespace
}  // namespace moekit::replay
