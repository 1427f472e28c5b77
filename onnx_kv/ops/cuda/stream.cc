// Streams, the copies and fills that run on them, and events.
#include <algorithm>

#include "onnx_kv/ops/capi.h"
#include "onnx_kv/ops/cuda/device.h"

using onnx_kv::Guard;
using onnx_kv::cuda::UseDevice;

namespace {

CUstream Stream(void* stream) { return static_cast<CUstream>(stream); }

CUevent Event(void* event) { return static_cast<CUevent>(event); }

void Copy(uint64_t destination, uint64_t source, size_t bytes, OnnxKvCopyKind kind, CUstream stream) {
  if (bytes == 0) return;
  switch (kind) {
    case ONNX_KV_HOST_TO_DEVICE:
      CU_CHECK(cuMemcpyHtoDAsync, destination, reinterpret_cast<const void*>(source), bytes, stream);
      return;
    case ONNX_KV_DEVICE_TO_HOST:
      CU_CHECK(cuMemcpyDtoHAsync, reinterpret_cast<void*>(destination), source, bytes, stream);
      return;
    case ONNX_KV_DEVICE_TO_DEVICE:
      CU_CHECK(cuMemcpyDtoDAsync, destination, source, bytes, stream);
      return;
  }
  throw onnx_kv::Error(ONNX_KV_INVALID_ARGUMENT, "no such kind of copy: " + std::to_string(kind));
}

void Copy2D(const OnnxKvPitchedCopy& copy, OnnxKvCopyKind kind, CUstream stream) {
  // Beyond this the driver refuses a pitch; the rows are few and long then.
  constexpr uint64_t kMaxPitch = (uint64_t{1} << 31) - 1;
  if (copy.height == 1 || std::max(copy.destination_pitch, copy.source_pitch) > kMaxPitch) {
    for (uint64_t row = 0; row < copy.height; ++row) {
      Copy(copy.destination + row * copy.destination_pitch, copy.source + row * copy.source_pitch, copy.width, kind,
           stream);
    }
    return;
  }
  if (copy.width == 0 || copy.height == 0) return;
  CUDA_MEMCPY2D plan{};
  plan.WidthInBytes = copy.width;
  plan.Height = copy.height;
  plan.srcPitch = copy.source_pitch;
  plan.dstPitch = copy.destination_pitch;
  if (kind == ONNX_KV_HOST_TO_DEVICE) {
    plan.srcMemoryType = CU_MEMORYTYPE_HOST;
    plan.srcHost = reinterpret_cast<const void*>(copy.source);
  } else {
    plan.srcMemoryType = CU_MEMORYTYPE_DEVICE;
    plan.srcDevice = copy.source;
  }
  if (kind == ONNX_KV_DEVICE_TO_HOST) {
    plan.dstMemoryType = CU_MEMORYTYPE_HOST;
    plan.dstHost = reinterpret_cast<void*>(copy.destination);
  } else {
    plan.dstMemoryType = CU_MEMORYTYPE_DEVICE;
    plan.dstDevice = copy.destination;
  }
  CU_CHECK(cuMemcpy2DAsync, &plan, stream);
}

// Whether the work behind a query is done; any status but "not ready" is an error.
int32_t Done(CUresult result, const char* call) {
  if (result == CUDA_ERROR_NOT_READY) return 0;
  onnx_kv::cuda::CheckDriver(result, call);
  return 1;
}

}  // namespace

OnnxKvStatus onnx_kv_cuda_stream_create(int32_t device, void** stream) {
  return Guard([&] {
    UseDevice use(device);
    CUstream created = nullptr;
    CU_CHECK(cuStreamCreate, &created, CU_STREAM_NON_BLOCKING);
    *stream = created;
  });
}

OnnxKvStatus onnx_kv_cuda_stream_destroy(int32_t device, void* stream) {
  return Guard([&] {
    UseDevice use(device);
    CU_CHECK(cuStreamDestroy, Stream(stream));
  });
}

OnnxKvStatus onnx_kv_cuda_stream_synchronize(int32_t device, void* stream) {
  return Guard([&] {
    UseDevice use(device);
    CU_CHECK(cuStreamSynchronize, Stream(stream));
  });
}

OnnxKvStatus onnx_kv_cuda_stream_query(int32_t device, void* stream, int32_t* done) {
  return Guard([&] {
    UseDevice use(device);
    *done = Done(onnx_kv::cuda::Driver().cuStreamQuery(Stream(stream)), "cuStreamQuery");
  });
}

OnnxKvStatus onnx_kv_cuda_copy(int32_t device, void* stream, uint64_t destination, uint64_t source, uint64_t bytes,
                               OnnxKvCopyKind kind) {
  return Guard([&] {
    UseDevice use(device);
    Copy(destination, source, bytes, kind, Stream(stream));
  });
}

OnnxKvStatus onnx_kv_cuda_copy_pitched(int32_t device, void* stream, const OnnxKvPitchedCopy* copies, uint64_t count,
                                       OnnxKvCopyKind kind) {
  return Guard([&] {
    UseDevice use(device);
    for (uint64_t i = 0; i < count; ++i) Copy2D(copies[i], kind, Stream(stream));
  });
}

OnnxKvStatus onnx_kv_cuda_fill(int32_t device, void* stream, uint64_t destination, uint8_t byte, uint64_t bytes) {
  return Guard([&] {
    UseDevice use(device);
    if (bytes != 0) CU_CHECK(cuMemsetD8Async, destination, byte, bytes, Stream(stream));
  });
}

OnnxKvStatus onnx_kv_cuda_event_create(int32_t device, void** event) {
  return Guard([&] {
    UseDevice use(device);
    CUevent created = nullptr;
    CU_CHECK(cuEventCreate, &created, CU_EVENT_DEFAULT);
    *event = created;
  });
}

OnnxKvStatus onnx_kv_cuda_event_destroy(int32_t device, void* event) {
  return Guard([&] {
    UseDevice use(device);
    CU_CHECK(cuEventDestroy, Event(event));
  });
}

OnnxKvStatus onnx_kv_cuda_event_record(int32_t device, void* event, void* stream) {
  return Guard([&] {
    UseDevice use(device);
    CU_CHECK(cuEventRecord, Event(event), Stream(stream));
  });
}

OnnxKvStatus onnx_kv_cuda_event_query(int32_t device, void* event, int32_t* done) {
  return Guard([&] {
    UseDevice use(device);
    *done = Done(onnx_kv::cuda::Driver().cuEventQuery(Event(event)), "cuEventQuery");
  });
}

OnnxKvStatus onnx_kv_cuda_event_synchronize(int32_t device, void* event) {
  return Guard([&] {
    UseDevice use(device);
    CU_CHECK(cuEventSynchronize, Event(event));
  });
}

OnnxKvStatus onnx_kv_cuda_event_elapsed(int32_t device, void* start, void* end, float* milliseconds) {
  return Guard([&] {
    UseDevice use(device);
    CU_CHECK(cuEventElapsedTime, milliseconds, Event(start), Event(end));
  });
}
