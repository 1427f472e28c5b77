// Host memory with the driver's habits: address space from mmap, granules from a memfd, mapped where they are wanted.
#pragma once

#include <vector>

#include "onnx_kv/ops/memory/backend.h"

namespace onnx_kv::memory {

class HostBackend final : public Backend {
 public:
  // `granule` is a multiple of the page size; 0 means one page.
  explicit HostBackend(uint64_t granule);
  ~HostBackend() override;

 private:
  uint64_t DoReserve(uint64_t bytes) override;
  void DoFree(uint64_t address, uint64_t bytes) override;
  uint64_t DoCreate() override;
  void DoDestroy(uint64_t handle) override;
  void DoMap(uint64_t address, uint64_t handle) override;
  void DoUnmap(uint64_t address) override;
  void DoSetAccess(uint64_t address, uint64_t bytes) override;

  int file_;                     // a granule's handle is its offset in this memfd
  uint64_t end_ = 0;             // offset after the last granule ever made
  std::vector<uint64_t> holes_;  // offsets of destroyed granules
};

}  // namespace onnx_kv::memory
