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

// Source and destination may overlap.
struct OnnxKvMove {
  uint64_t source;
  uint64_t destination;
  uint64_t bytes;
};

ONNX_KV_EXPORT OnnxKvStatus onnx_kv_cuda_device_count(int32_t* count);
ONNX_KV_EXPORT OnnxKvStatus onnx_kv_cuda_device_info(int32_t device, OnnxKvDeviceInfo* info);
ONNX_KV_EXPORT OnnxKvStatus onnx_kv_cuda_memory_info(int32_t device, uint64_t* free_bytes, uint64_t* total_bytes);
ONNX_KV_EXPORT OnnxKvStatus onnx_kv_cuda_synchronize(int32_t device);

ONNX_KV_EXPORT OnnxKvStatus onnx_kv_cuda_stream_create(int32_t device, void** stream);
ONNX_KV_EXPORT OnnxKvStatus onnx_kv_cuda_stream_destroy(int32_t device, void* stream);
ONNX_KV_EXPORT OnnxKvStatus onnx_kv_cuda_stream_synchronize(int32_t device, void* stream);
ONNX_KV_EXPORT OnnxKvStatus onnx_kv_cuda_stream_query(int32_t device, void* stream, int32_t* done);
ONNX_KV_EXPORT OnnxKvStatus onnx_kv_cuda_copy(int32_t device, void* stream, uint64_t destination, uint64_t source,
                                              uint64_t bytes, OnnxKvCopyKind kind);
ONNX_KV_EXPORT OnnxKvStatus onnx_kv_cuda_copy_pitched(int32_t device, void* stream, const OnnxKvPitchedCopy* copies,
                                                      uint64_t count, OnnxKvCopyKind kind);
// In order, each after the last. Waits for the stream if a move overlaps itself.
ONNX_KV_EXPORT OnnxKvStatus onnx_kv_cuda_move(int32_t device, void* stream, const OnnxKvMove* moves, uint64_t count);
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

// ---- Reservations and the pools of granules behind them (ops/memory) ----
//
// A pool belongs to the host or to one CUDA device; a reservation is address space whose windows a pool backs with
// granules. Every operation is all or nothing, over all spans that it names, and all of these come from one pool.

struct OnnxKvMemoryCounters {
  uint64_t granule_bytes;
  uint64_t reserved_bytes;  // address space of the reservations alive
  uint64_t physical_bytes;  // granules in existence
  uint64_t idle_bytes;      // granules of these that nothing maps
  uint64_t creates;
  uint64_t maps;
  uint64_t unmaps;
  uint64_t map_ns;  // host time spent in commits and shares
};

struct OnnxKvSpan {
  void* reservation;
  uint64_t offset;
  uint64_t bytes;
};

// granule: 0 for the smallest (a page; what the device says), else a multiple of it.
ONNX_KV_EXPORT OnnxKvStatus onnx_kv_pool_create_host(uint64_t granule, void** pool);
// ONNX_KV_UNSUPPORTED on a device without virtual memory management.
ONNX_KV_EXPORT OnnxKvStatus onnx_kv_pool_create_cuda(int32_t device, uint64_t granule, void** pool);
// The pool's reservations stay valid and keep what they need of it.
ONNX_KV_EXPORT OnnxKvStatus onnx_kv_pool_destroy(void* pool);
// Gives idle granules back to the driver until at most `keep_bytes` of them remain.
ONNX_KV_EXPORT OnnxKvStatus onnx_kv_pool_trim(void* pool, uint64_t keep_bytes, uint64_t* released_bytes);
ONNX_KV_EXPORT OnnxKvStatus onnx_kv_pool_counters(void* pool, OnnxKvMemoryCounters* counters);
// For tests: lets `calls` more driver calls through and fails the one after them. Negative: never.
ONNX_KV_EXPORT OnnxKvStatus onnx_kv_pool_fail_after(void* pool, int64_t calls);

// `bytes` is rounded up to whole granules: `reserved_bytes`.
ONNX_KV_EXPORT OnnxKvStatus onnx_kv_reservation_create(void* pool, uint64_t bytes, void** reservation,
                                                       uint64_t* address, uint64_t* reserved_bytes);
ONNX_KV_EXPORT OnnxKvStatus onnx_kv_reservation_destroy(void* reservation, uint64_t* freed);

// Spans of one reservation are adjacent in the array and ascending.
// missing: how many granules a commit would map. commit: backs every window that a span touches; `granules` were not.
ONNX_KV_EXPORT OnnxKvStatus onnx_kv_memory_missing(void* pool, const OnnxKvSpan* spans, uint64_t count,
                                                   uint64_t* granules);
ONNX_KV_EXPORT OnnxKvStatus onnx_kv_memory_commit(void* pool, const OnnxKvSpan* spans, uint64_t count,
                                                  uint64_t* granules);
// Unmaps every window that lies wholly within a span; `freed` granules are now mapped nowhere. The caller makes sure that
// no work in flight touches them.
ONNX_KV_EXPORT OnnxKvStatus onnx_kv_memory_decommit(void* pool, const OnnxKvSpan* spans, uint64_t count,
                                                    uint64_t* unmapped, uint64_t* freed);
// Maps the granules of sources[i] at targets[i] too: whole granules, the source committed and the target not.
ONNX_KV_EXPORT OnnxKvStatus onnx_kv_memory_share(void* pool, const OnnxKvSpan* sources, const OnnxKvSpan* targets,
                                                 uint64_t count);
// How many windows touched by the span map a granule that is mapped elsewhere too.
ONNX_KV_EXPORT OnnxKvStatus onnx_kv_memory_shared(void* pool, const OnnxKvSpan* span, uint64_t* granules);

ONNX_KV_EXPORT OnnxKvStatus onnx_kv_host_move(const OnnxKvMove* moves, uint64_t count);
ONNX_KV_EXPORT OnnxKvStatus onnx_kv_host_copy_pitched(const OnnxKvPitchedCopy* copies, uint64_t count);

// ---- Kernels, compiled at run time (ops/cuda/compiler.h) and the operator on the GPU (ops/gqa/cuda) ----

// Where NVRTC's shared object lies, for a process that has not used it yet.
ONNX_KV_EXPORT OnnxKvStatus onnx_kv_set_nvrtc_path(const char* path);

// Compiles one specialisation, e.g. "onnx_kv/ops/gqa/cuda/append.cu DTYPE=1 HEAD_DIM=128", for `arch`, e.g. "sm_90a", on
// any machine with NVRTC. `size` is the machine code's, of which `image` gets as much as fits; `log` gets the assembler's report.
ONNX_KV_EXPORT OnnxKvStatus onnx_kv_cuda_compile(const char* key, const char* arch, void* image, uint64_t capacity,
                                                 uint64_t* size, char* log, uint64_t log_capacity);
// The same through the disk cache, without a report.
ONNX_KV_EXPORT OnnxKvStatus onnx_kv_cuda_compile_cached(const char* key, const char* arch, void* image, uint64_t capacity,
                                                        uint64_t* size);

// The specialisations, one a line, that a GroupQueryAttention node needs on a device whose blocks may have `shared_bytes`
// of shared memory and whose compute capability begins with `major`. `dtype` is params.h's; `group` is the query heads a
// KV head.
ONNX_KV_EXPORT OnnxKvStatus onnx_kv_gqa_kernels(int32_t dtype, int32_t head_dim, int32_t group, int32_t shared_bytes,
                                                int32_t major, char* keys, uint64_t capacity);

// Enqueues one call of the operator. `params` is ops/gqa/params.h's GqaParams.
ONNX_KV_EXPORT OnnxKvStatus onnx_kv_cuda_gqa(int32_t device, void* stream, const void* params);

// ---- The end of a decode step (ops/cuda/step.cu) ----

// Chooses every row's next token from its logits and writes it, with the lengths that follow from it, where the next step
// reads them. Addresses are of memory that the device reaches; 0 leaves an optional one out. Logits with a NaN or +inf, or
// nothing but -inf, choose the token -1. See step_params.cuh.
struct OnnxKvChoice {
  int32_t dtype;  // of the logits, as onnx_kv::DType
  int32_t batch;
  int32_t vocab;
  int32_t ring_size;
  uint64_t logits;     // row r begins at r * row_stride elements
  int64_t row_stride;  // elements
  uint64_t workspace;  // of the size onnx_kv_cuda_choice_workspace says; zeroed once, left zeroed where it matters
  float temperature;   // <= 0: greedy, the lowest index among equals
  int32_t top_k;       // <= 0: off
  float top_p;         // >= 1: off
  uint64_t seed;
  uint64_t input_ids;       // int64 [batch]
  uint64_t position_ids;    // int64 [batch], optional
  uint64_t seqlens_k;       // int32 [batch]
  uint64_t attention_mask;  // int64 [batch, mask_stride], optional
  int64_t mask_stride;
  uint64_t ring;   // int64 [batch, ring_size]: chosen token n of a row is at n % ring_size
  uint64_t steps;  // int32 [batch]: how many were chosen
  uint64_t live;   // int32 [batch], optional: a row with 0 stays as it is
};

ONNX_KV_EXPORT OnnxKvStatus onnx_kv_cuda_choice_workspace(int32_t batch, int32_t vocab, uint64_t* bytes);
ONNX_KV_EXPORT OnnxKvStatus onnx_kv_cuda_choose(int32_t device, void* stream, const OnnxKvChoice* choice);
