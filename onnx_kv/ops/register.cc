// What ONNX Runtime calls when a session loads the library.
#include "onnx_kv/ops/abi/node.h"
#include "onnx_kv/ops/capi.h"
#include "onnx_kv/ops/gqa/op.h"

namespace onnx_kv {
namespace {

// One domain serves every session of the process and must outlive them all, so it is never released.
ort::CustomOpDomain* Domain() {
  static ort::CustomOpDomain* const domain = [] {
    ort::CustomOpDomain* created = nullptr;
    ort::Check(ort::GetApi().CreateCustomOpDomain("com.microsoft", &created));
    for (const ort::CustomOp* op : GqaOps()) ort::Check(ort::GetApi().CustomOpDomain_Add(created, op));
    return created;
  }();
  return domain;
}

}  // namespace
}  // namespace onnx_kv

ONNX_KV_EXPORT onnx_kv::ort::Status* RegisterCustomOps(onnx_kv::ort::SessionOptions* options,
                                                       const onnx_kv::ort::ApiBase* base) {
  namespace ort = onnx_kv::ort;
  if (ort::Status* too_old = ort::Connect(base)) return too_old;
  return ort::AsStatus([&] { ort::Check(ort::GetApi().AddCustomOpDomain(options, onnx_kv::Domain())); });
}
