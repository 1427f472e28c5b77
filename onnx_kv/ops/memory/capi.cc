// The C face of pools and reservations.
#include "onnx_kv/ops/capi.h"

#include <vector>

#include "onnx_kv/ops/memory/cuda_backend.h"
#include "onnx_kv/ops/memory/host_backend.h"
#include "onnx_kv/ops/memory/pool.h"

namespace {

using onnx_kv::Error;
using onnx_kv::Guard;
using onnx_kv::memory::Pool;
using onnx_kv::memory::Reservation;
using onnx_kv::memory::Share;
using onnx_kv::memory::Span;

std::shared_ptr<Pool>& PoolOf(void* pool) { return *static_cast<std::shared_ptr<Pool>*>(pool); }

Span SpanOf(const OnnxKvSpan& span) { return {static_cast<Reservation*>(span.reservation), span.offset, span.bytes}; }

std::vector<Span> SpansOf(const OnnxKvSpan* spans, uint64_t count) {
  std::vector<Span> converted;
  converted.reserve(count);
  for (uint64_t i = 0; i < count; ++i) converted.push_back(SpanOf(spans[i]));
  return converted;
}

}  // namespace

OnnxKvStatus onnx_kv_pool_create_host(uint64_t granule, void** pool) {
  return Guard([&] {
    auto backend = std::make_unique<onnx_kv::memory::HostBackend>(granule);
    *pool = new std::shared_ptr<Pool>(std::make_shared<Pool>(std::move(backend)));
  });
}

OnnxKvStatus onnx_kv_pool_create_cuda(int32_t device, uint64_t granule, void** pool) {
  return Guard([&] {
    auto backend = std::make_unique<onnx_kv::memory::CudaBackend>(onnx_kv::cuda::Device::Get(device), granule);
    *pool = new std::shared_ptr<Pool>(std::make_shared<Pool>(std::move(backend)));
  });
}

OnnxKvStatus onnx_kv_pool_destroy(void* pool) {
  return Guard([&] { delete &PoolOf(pool); });
}

OnnxKvStatus onnx_kv_pool_trim(void* pool, uint64_t keep_bytes, uint64_t* released_bytes) {
  return Guard([&] { *released_bytes = PoolOf(pool)->Trim(keep_bytes); });
}

OnnxKvStatus onnx_kv_pool_counters(void* pool, OnnxKvMemoryCounters* counters) {
  return Guard([&] { *counters = PoolOf(pool)->counters(); });
}

OnnxKvStatus onnx_kv_pool_fail_after(void* pool, int64_t calls) {
  return Guard([&] { PoolOf(pool)->FailAfter(calls); });
}

OnnxKvStatus onnx_kv_reservation_create(void* pool, uint64_t bytes, void** reservation, uint64_t* address,
                                        uint64_t* reserved_bytes) {
  return Guard([&] {
    auto created = std::make_unique<Reservation>(PoolOf(pool), bytes);
    *address = created->address;
    *reserved_bytes = created->bytes;
    *reservation = created.release();
  });
}

OnnxKvStatus onnx_kv_reservation_destroy(void* reservation, uint64_t* freed) {
  return Guard([&] {
    const std::unique_ptr<Reservation> owned(static_cast<Reservation*>(reservation));
    *freed = owned->Close();
  });
}

OnnxKvStatus onnx_kv_memory_missing(void* pool, const OnnxKvSpan* spans, uint64_t count, uint64_t* granules) {
  return Guard([&] { *granules = PoolOf(pool)->Missing(SpansOf(spans, count)); });
}

OnnxKvStatus onnx_kv_memory_commit(void* pool, const OnnxKvSpan* spans, uint64_t count, uint64_t* granules) {
  return Guard([&] { *granules = PoolOf(pool)->Commit(SpansOf(spans, count)); });
}

OnnxKvStatus onnx_kv_memory_decommit(void* pool, const OnnxKvSpan* spans, uint64_t count, uint64_t* unmapped,
                                     uint64_t* freed) {
  return Guard([&] {
    const auto released = PoolOf(pool)->Decommit(SpansOf(spans, count));
    *unmapped = released.unmapped;
    *freed = released.freed;
  });
}

OnnxKvStatus onnx_kv_memory_share(void* pool, const OnnxKvSpan* sources, const OnnxKvSpan* targets, uint64_t count) {
  return Guard([&] {
    std::vector<Share> shares;
    shares.reserve(count);
    for (uint64_t i = 0; i < count; ++i) shares.push_back({SpanOf(sources[i]), SpanOf(targets[i])});
    PoolOf(pool)->Map(shares);
  });
}

OnnxKvStatus onnx_kv_memory_shared(void* pool, const OnnxKvSpan* span, uint64_t* granules) {
  return Guard([&] { *granules = PoolOf(pool)->Shared(SpanOf(*span)); });
}
