// golden.safetensors: inputs and results of MoE blocks, in the three schemas that test data comes in.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <moekit/tensor.hpp>

#include "io/safetensors.hpp"

namespace moekit::io {

enum class GoldenSchema : std::uint8_t {
  families,   ///< <module>|M<rows>|{in,out,router0,…}
  model,      ///< layers.N.mlp.{in,router_logits,out}
  quantised,  ///< <module>|M<rows>|{in,out,router_logits,topk_ids,topk_weights,out_actq,…}, float64 results
};

/// How far a result may be from a case, as a share of the largest magnitude of the expected tensor.
struct GoldenTolerances {
  double f32 = 0;                ///< `out`, everything in float32
  double bf16 = 0;               ///< `out`, weights, input and intermediates in bf16
  double bf16_intermediate = 0;  ///< `out`, only the intermediate in bf16
  double bf16_rms = 0;           ///< relative RMS that goes with `bf16`; 0 = none stated
  double actq = 0;               ///< `out_actq*`, intermediate in float32 until it is quantised
  double actq_bf16 = 0;          ///< `out_actq*`, intermediate rounded to bf16 first
  double logits = 0, weights = 0;
  /// Rows whose k-th and next logit are closer than this may choose other experts with a bf16 router.
  double near_tie = 0;
};

/// One call of one block. Tensors that the file does not have are absent.
struct GoldenCase {
  std::string module;       ///< as CheckpointLayer::module
  std::int64_t layer = 0;   ///< decoder layer
  std::string name;         ///< "M37"
  Tensor in;                ///< f32 [M, H]
  Tensor out;               ///< f32 or f64 [M, H]
  Tensor logits;            ///< f32 [M, E]
  Tensor ids;               ///< i64 [M, k]
  Tensor weights;           ///< f32 [M, k], beside ids
  Tensor scores;            ///< f32 [M, E], 0 where not chosen (llama4)
  Tensor out_actq;          ///< f64 [M, H]: activations quantised as the format says (int8: absmax / 127.5)
  Tensor out_actq_127;      ///< f64 [M, H]: int8 with absmax / 127
  bool ids_ordered = true;  ///< false: compare as sets
};

class Golden {
 public:
  /// `model_type` of the checkpoint decides whether ids are ordered. Throws Error bad_file.
  Golden(const std::string& path, const std::string& model_type);

  GoldenSchema schema() const { return schema_; }
  const GoldenTolerances& tolerances() const;
  const std::vector<GoldenCase>& cases() const { return cases_; }  ///< by module, then rows
  const SafetensorsFile& file() const { return *file_; }           ///< the step-by-step tensors of the quantised schema

 private:
  void read_model_case(const std::string& prefix);
  void read_block_case(const std::string& prefix);
  std::shared_ptr<const SafetensorsFile> file_;
  GoldenSchema schema_ = GoldenSchema::families;
  std::vector<GoldenCase> cases_;
};

}  // namespace moekit::io
