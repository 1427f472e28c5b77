// The flat C interface that Python loads with ctypes. Every function that can fail returns a Status and leaves a
// message for onnx_kv_last_error(); no exception crosses this boundary.
#pragma once

#include <cstddef>
#include <cstdint>

#define ONNX_KV_EXPORT extern "C" __attribute__((visibility("default")))

// The numbers are onnx_kv/_native.py's, which turns each into its typed error.
enum OnnxKvStatus : int32_t {
  ONNX_KV_OK = 0,
  ONNX_KV_INVALID_ARGUMENT = 1,
  ONNX_KV_OUT_OF_MEMORY = 2,
  ONNX_KV_DRIVER_ERROR = 3,
  ONNX_KV_UNSUPPORTED = 4,
  ONNX_KV_INTERNAL = 5,
};

// The message of this thread's last failed call; empty if there was none. Valid until the thread's next call.
ONNX_KV_EXPORT const char* onnx_kv_last_error();

// ---- CUDA devices, streams, buffers and captured graphs (ops/cuda) ----
//
// Every call names its device (ordinal) and may come from any thread. Handles of streams, events and graphs are the
// driver's own (CUstream, CUevent, CUgraphExec). Nothing here waits for the device unless its name says so.

struct OnnxKvDeviceInfo {
  char name[256];
  uint64_t total_bytes;
  int32_t compute_major;
  int32_t compute_minor;
  int32_t multiprocessors;
  int32_t virtual_memory;  // 1: reservations can be backed granule by granule
  int32_t driver_version;  // e.g. 13000
};

enum OnnxKvCopyKind : int32_t { ONNX_KV_HOST_TO_DEVICE = 0, ONNX_KV_DEVICE_TO_HOST = 1, ONNX_KV_DEVICE_TO_DEVICE = 2 };

// `height` rows of `width` bytes; a pitch is the bytes from one row's start to the next. Source and destination are
// disjoint.
struct OnnxKvPitchedCopy {
  uint64_t destination;
  uint64_t destination_pitch;
  uint64_t source;
  uint64_t source_pitch;
  uint64_t width;
  uint64_t height;
};

ONNX_KV_EXPORT OnnxKvStatus onnx_kv_cuda_device_count(int32_t* count);
ONNX_KV_EXPORT OnnxKvStatus onnx_kv_cuda_device_info(int32_t device, OnnxKvDeviceInfo* info);
ONNX_KV_EXPORT OnnxKvStatus onnx_kv_cuda_memory_info(int32_t device, uint64_t* free_bytes, uint64_t* total_bytes);
ONNX_KV_EXPORT OnnxKvStatus onnx_kv_cuda_synchronize(int32_t device);

ONNX_KV_EXPORT OnnxKvStatus onnx_kv_cuda_stream_create(int32_t device, void** stream);
ONNX_KV_EXPORT OnnxKvStatus onnx_kv_cuda_stream_destroy(int32_t device, void* stream);
ONNX_KV_EXPORT OnnxKvStatus onnx_kv_cuda_stream_synchronize(int32_t device, void* stream);
ONNX_KV_EXPORT OnnxKvStatus onnx_kv_cuda_stream_query(int32_t device, void* stream, int32_t* done);
ONNX_KV_EXPORT OnnxKvStatus onnx_kv_cuda_stream_wait_event(int32_t device, void* stream, void* event);
ONNX_KV_EXPORT OnnxKvStatus onnx_kv_cuda_copy(int32_t device, void* stream, uint64_t destination, uint64_t source,
                                              uint64_t bytes, OnnxKvCopyKind kind);
ONNX_KV_EXPORT OnnxKvStatus onnx_kv_cuda_copy_pitched(int32_t device, void* stream, const OnnxKvPitchedCopy* copies,
                                                      uint64_t count, OnnxKvCopyKind kind);
ONNX_KV_EXPORT OnnxKvStatus onnx_kv_cuda_fill(int32_t device, void* stream, uint64_t destination, uint8_t byte,
                                              uint64_t bytes);

ONNX_KV_EXPORT OnnxKvStatus onnx_kv_cuda_event_create(int32_t device, void** event);
ONNX_KV_EXPORT OnnxKvStatus onnx_kv_cuda_event_destroy(int32_t device, void* event);
ONNX_KV_EXPORT OnnxKvStatus onnx_kv_cuda_event_record(int32_t device, void* event, void* stream);
ONNX_KV_EXPORT OnnxKvStatus onnx_kv_cuda_event_query(int32_t device, void* event, int32_t* done);
ONNX_KV_EXPORT OnnxKvStatus onnx_kv_cuda_event_synchronize(int32_t device, void* event);
ONNX_KV_EXPORT OnnxKvStatus onnx_kv_cuda_event_elapsed(int32_t device, void* start, void* end, float* milliseconds);

ONNX_KV_EXPORT OnnxKvStatus onnx_kv_cuda_buffer_create(int32_t device, uint64_t bytes, uint64_t* address);
ONNX_KV_EXPORT OnnxKvStatus onnx_kv_cuda_buffer_destroy(int32_t device, uint64_t address);
ONNX_KV_EXPORT OnnxKvStatus onnx_kv_cuda_pinned_create(int32_t device, uint64_t bytes, uint64_t* address);
ONNX_KV_EXPORT OnnxKvStatus onnx_kv_cuda_pinned_destroy(int32_t device, uint64_t address);

// Capture is thread-local: other threads may allocate meanwhile. `end` instantiates what was captured; `abort` ends a
// capture, whatever state it is in, and leaves the stream usable.
ONNX_KV_EXPORT OnnxKvStatus onnx_kv_cuda_capture_begin(int32_t device, void* stream);
ONNX_KV_EXPORT OnnxKvStatus onnx_kv_cuda_capture_end(int32_t device, void* stream, void** graph, uint64_t* nodes);
ONNX_KV_EXPORT OnnxKvStatus onnx_kv_cuda_capture_abort(int32_t device, void* stream);
ONNX_KV_EXPORT OnnxKvStatus onnx_kv_cuda_graph_upload(int32_t device, void* graph, void* stream);
ONNX_KV_EXPORT OnnxKvStatus onnx_kv_cuda_graph_launch(int32_t device, void* graph, void* stream);
ONNX_KV_EXPORT OnnxKvStatus onnx_kv_cuda_graph_destroy(int32_t device, void* graph);
