// Capturing a stream's work from outside, and launching it again by one driver call.
#include "onnx_kv/ops/capi.h"
#include "onnx_kv/ops/cuda/device.h"

namespace {

using onnx_kv::Guard;
using onnx_kv::cuda::Driver;
using onnx_kv::cuda::UseDevice;

// A captured graph, kept only until it is instantiated.
class Graph {
 public:
  explicit Graph(CUgraph graph) : graph_(graph) {}
  ~Graph() {
    if (graph_ != nullptr) Driver().cuGraphDestroy(graph_);
  }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;

  CUgraph get() const { return graph_; }

 private:
  CUgraph graph_;
};

}  // namespace

OnnxKvStatus onnx_kv_cuda_capture_begin(int32_t device, void* stream) {
  return Guard([&] {
    UseDevice use(device);
    CU_CHECK(cuStreamBeginCapture, static_cast<CUstream>(stream), CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
  });
}

OnnxKvStatus onnx_kv_cuda_capture_end(int32_t device, void* stream, void** graph, uint64_t* nodes) {
  return Guard([&] {
    UseDevice use(device);
    CUgraph captured = nullptr;
    CU_CHECK(cuStreamEndCapture, static_cast<CUstream>(stream), &captured);
    Graph owned(captured);
    size_t count = 0;
    CU_CHECK(cuGraphGetNodes, owned.get(), nullptr, &count);
    CUgraphExec executable = nullptr;
    CU_CHECK(cuGraphInstantiateWithFlags, &executable, owned.get(), 0);
    *graph = executable;
    *nodes = count;
  });
}

OnnxKvStatus onnx_kv_cuda_capture_abort(int32_t device, void* stream) {
  return Guard([&] {
    UseDevice use(device);
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    CU_CHECK(cuStreamIsCapturing, static_cast<CUstream>(stream), &status);
    if (status == CU_STREAM_CAPTURE_STATUS_NONE) return;
    // Ending an invalidated capture reports the invalidation; the stream works again whatever it reports.
    CUgraph captured = nullptr;
    Driver().cuStreamEndCapture(static_cast<CUstream>(stream), &captured);
    Graph discarded(captured);
  });
}

OnnxKvStatus onnx_kv_cuda_graph_upload(int32_t device, void* graph, void* stream) {
  return Guard([&] {
    UseDevice use(device);
    CU_CHECK(cuGraphUpload, static_cast<CUgraphExec>(graph), static_cast<CUstream>(stream));
  });
}

OnnxKvStatus onnx_kv_cuda_graph_launch(int32_t device, void* graph, void* stream) {
  return Guard([&] {
    UseDevice use(device);
    CU_CHECK(cuGraphLaunch, static_cast<CUgraphExec>(graph), static_cast<CUstream>(stream));
  });
}

OnnxKvStatus onnx_kv_cuda_graph_destroy(int32_t device, void* graph) {
  return Guard([&] {
    UseDevice use(device);
    CU_CHECK(cuGraphExecDestroy, static_cast<CUgraphExec>(graph));
  });
}
