// What a memory driver can do: reserve addresses, make granules of physical memory, map the ones at the others.
//
// A granule is the unit of physical memory, mapped at multiples of its size from a reservation's start. One granule may be
// mapped at several addresses. Nothing here keeps books: pool.h does.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "onnx_kv/ops/status.h"

namespace onnx_kv::memory {

class Backend {
 public:
  explicit Backend(uint64_t granule) : granule_(granule) {}
  virtual ~Backend() = default;
  Backend(const Backend&) = delete;
  Backend& operator=(const Backend&) = delete;

  uint64_t granule() const { return granule_; }

  // Address space of `bytes`, a multiple of the granule. Unmapped: touching it faults.
  uint64_t Reserve(uint64_t bytes) {
    Enter("reserve");
    return DoReserve(bytes);
  }
  void Free(uint64_t address, uint64_t bytes) {
    Enter("free");
    DoFree(address, bytes);
  }
  // One granule of physical memory; its content is undefined.
  uint64_t Create() {
    Enter("create");
    return DoCreate();
  }
  void Destroy(uint64_t handle) {
    Enter("destroy");
    DoDestroy(handle);
  }
  void Map(uint64_t address, uint64_t handle) {
    Enter("map");
    DoMap(address, handle);
  }
  void Unmap(uint64_t address) {
    Enter("unmap");
    DoUnmap(address);
  }
  // Makes mapped granules readable and writable. Called once for each contiguous range of new ones.
  void SetAccess(uint64_t address, uint64_t bytes) {
    Enter("set access");
    DoSetAccess(address, bytes);
  }

  // Waits for all work that may touch this memory.
  virtual void Quiesce() {}

  // For tests: lets `calls` more calls through and fails the one after them. Negative: never.
  void FailAfter(int64_t calls) { calls_left_ = calls; }

 private:
  virtual uint64_t DoReserve(uint64_t bytes) = 0;
  virtual void DoFree(uint64_t address, uint64_t bytes) = 0;
  virtual uint64_t DoCreate() = 0;
  virtual void DoDestroy(uint64_t handle) = 0;
  virtual void DoMap(uint64_t address, uint64_t handle) = 0;
  virtual void DoUnmap(uint64_t address) = 0;
  virtual void DoSetAccess(uint64_t address, uint64_t bytes) = 0;

  void Enter(const char* call) {
    if (calls_left_ < 0) return;
    if (calls_left_-- == 0) throw Error(ONNX_KV_DRIVER_ERROR, std::string("injected failure of ") + call);
  }

  uint64_t granule_;
  int64_t calls_left_ = -1;
};

}  // namespace onnx_kv::memory
