#include "onnx_kv/ops/gqa/cuda/workspace.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <utility>

#include "onnx_kv/ops/cuda/modules.h"

namespace onnx_kv::cuda {
namespace {

struct Held {
  Workspace workspace;
  uint64_t floats;
  uint64_t tickets;
};

Held Allocate(CUstream stream, uint64_t floats, uint64_t tickets) {
  Held held{{}, floats, tickets};
  CU_CHECK(cuMemAlloc, &held.workspace.results, floats * 4 + tickets * 4);
  held.workspace.tickets = held.workspace.results + floats * 4;
  CU_CHECK(cuMemsetD32Async, held.workspace.tickets, 0, tickets, stream);
  return held;
}

}  // namespace

Workspace WorkspaceOf(CUstream stream, uint64_t floats, uint64_t tickets) {
  static std::mutex mutex;
  static std::map<std::pair<CUcontext, CUstream>, Held> workspaces;
  CUcontext context;
  CU_CHECK(cuCtxGetCurrent, &context);
  std::lock_guard lock(mutex);
  Held& held = workspaces[{context, stream}];
  if (held.floats < floats || held.tickets < tickets) {
    RefuseInCapture(stream, "a workspace of " + std::to_string((floats + tickets) * 4) + " bytes");
    held = Allocate(stream, std::max(floats, held.floats), std::max(tickets, held.tickets));
  }
  return held.workspace;
}

}  // namespace onnx_kv::cuda
