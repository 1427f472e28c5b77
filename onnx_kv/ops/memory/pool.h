// The granules of one device and the reservations that they are mapped in.
//
// A pool keeps granules that nothing maps any more, because making one is by far the dearest call, and gives them back
// to the driver when it is trimmed. Every operation is all or nothing: when a driver call fails, the calls before it
// are undone and the failure is thrown. Safe for use from several threads.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "onnx_kv/ops/capi.h"
#include "onnx_kv/ops/memory/backend.h"

namespace onnx_kv::memory {

struct Granule {
  uint64_t handle;
  uint64_t mappings = 0;
};

class Pool;

// Address space, and which granule each of its windows maps. Only its pool changes it, under the pool's lock.
struct Reservation {
  Reservation(std::shared_ptr<Pool> owner, uint64_t size);
  ~Reservation();
  Reservation(const Reservation&) = delete;
  Reservation& operator=(const Reservation&) = delete;

  // Unmaps everything and gives the address space back, once. Returns how many granules nothing maps any more.
  uint64_t Close();

  std::shared_ptr<Pool> pool;
  uint64_t bytes;                        // a multiple of the granule
  uint64_t address;                      // 0 once closed
  std::map<uint64_t, Granule*> windows;  // by window number, i.e. offset / granule; absent: unmapped
};

// Bytes [offset, offset + bytes) of a reservation.
struct Span {
  Reservation* reservation;
  uint64_t offset;
  uint64_t bytes;
};

// `target` maps the granules of `source`; both begin at a window's edge.
struct Share {
  Span source;
  Span target;
};

struct Released {
  uint64_t unmapped = 0;  // windows
  uint64_t freed = 0;     // granules that nothing maps any more
};

class Pool {
 public:
  explicit Pool(std::unique_ptr<Backend> backend);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  // Number of windows that Commit(spans) would have to map.
  uint64_t Missing(std::span<const Span> spans);
  // Backs every window that a span touches; windows already backed stay as they are. Returns how many were not.
  uint64_t Commit(std::span<const Span> spans);
  // Unmaps every window that lies wholly within a span. No work that may touch one is in flight.
  Released Decommit(std::span<const Span> spans);
  // Maps source windows, all of which are backed, also at target windows, none of which is.
  void Map(std::span<const Share> shares);
  // Number of windows touched by a span whose granule is mapped elsewhere too.
  uint64_t Shared(const Span& span);
  // Gives unmapped granules back to the driver until at most `keep` bytes of them remain; returns the bytes given back.
  uint64_t Trim(uint64_t keep);

  OnnxKvMemoryCounters counters();
  void FailAfter(int64_t calls);

 private:
  friend struct Reservation;
  class Mapping;  // a change of mappings that undoes itself unless kept

  uint64_t Reserve(uint64_t bytes);
  uint64_t Free(Reservation& reservation) noexcept;
  void Destroy(Granule* granule);
  void CheckSpan(const Span& span) const;

  std::mutex mutex_;
  std::unique_ptr<Backend> backend_;
  std::vector<Granule*> idle_;
  OnnxKvMemoryCounters counters_{};
};

}  // namespace onnx_kv::memory
