// Which kernels serve a node, in which shape: the one place that lists the specialisations.
#pragma once

#include "onnx_kv/ops/cuda/compiler.h"
#include "onnx_kv/ops/gqa/cuda/decode_plan.h"
#include "onnx_kv/ops/gqa/params.h"

namespace onnx_kv::cuda {

// What decides a kernel's code. `group` is the query heads a KV head.
struct NodeShape {
  DType dtype;
  int32_t head_dim;
  int32_t group;
};

struct DeviceLimits {
  int32_t multiprocessors;
  int32_t shared_bytes;  // that one block may have
  int32_t major;         // of the compute capability
};

struct Kernel {
  Specialisation specialisation;
  const char* entry;
  uint32_t threads;
  uint32_t shared_bytes;  // dynamic
};

struct DecodePlan {
  Kernel kernel;
  int32_t heads;      // query heads of a block, padding included
  int32_t places;     // blocks that one token of a row has work for
  int32_t unit;       // tokens that a block takes at a time
  SplitRule splits;
};

struct PrefillPlan {
  Kernel attend;
  int32_t rows;  // of queries, a block
};

// Throw Error (ONNX_KV_UNSUPPORTED) for a head size that is not 32, 40, …, 256. Decode of one row alone has large blocks,
// one a multiprocessor; of several rows, smaller ones, whose beginnings and ends overlap.
DecodePlan PlanDecode(const NodeShape& shape, int32_t kv_heads, int32_t batch, const DeviceLimits& limits);
PrefillPlan PlanPrefill(const NodeShape& shape, const DeviceLimits& limits);
Kernel PlanAppend(const NodeShape& shape);
Kernel PlanCopyPrefix(const NodeShape& shape);

// Every kernel that a node of this shape can need, one specialisation each.
std::vector<Specialisation> KernelsOf(const NodeShape& shape, const DeviceLimits& limits);

}  // namespace onnx_kv::cuda
