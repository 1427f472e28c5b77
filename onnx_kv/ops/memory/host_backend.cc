#include "onnx_kv/ops/memory/host_backend.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace onnx_kv::memory {
namespace {

uint64_t PageSize() { return static_cast<uint64_t>(sysconf(_SC_PAGESIZE)); }

uint64_t GranuleOf(uint64_t wanted) {
  const uint64_t page = PageSize();
  if (wanted % page != 0) {
    throw Error(ONNX_KV_INVALID_ARGUMENT, "a host granule of " + std::to_string(wanted) +
                                              " bytes is not a multiple of the page size, " + std::to_string(page));
  }
  return wanted == 0 ? page : wanted;
}

[[noreturn]] void ThrowErrno(const char* call) {
  const int number = errno;
  const bool memory = number == ENOMEM || number == ENOSPC || number == EAGAIN;
  std::string message = std::string(call) + ": " + std::strerror(number);
  if (number == ENOMEM && std::strcmp(call, "mmap") == 0) {
    message += " (or more mappings than vm.max_map_count allows: use a larger granule)";
  }
  throw Error(memory ? ONNX_KV_OUT_OF_MEMORY : ONNX_KV_DRIVER_ERROR, message);
}

void* Pointer(uint64_t address) { return reinterpret_cast<void*>(address); }

}  // namespace

HostBackend::HostBackend(uint64_t granule) : Backend(GranuleOf(granule)), file_(memfd_create("onnx_kv", MFD_CLOEXEC)) {
  if (file_ < 0) ThrowErrno("memfd_create");
}

HostBackend::~HostBackend() { close(file_); }

uint64_t HostBackend::DoReserve(uint64_t bytes) {
  // mmap aligns to pages alone: ask for a granule more and give back what lies around the aligned part.
  const uint64_t slack = granule() - PageSize();
  void* raw = mmap(nullptr, bytes + slack, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (raw == MAP_FAILED) ThrowErrno("mmap");
  const uint64_t start = reinterpret_cast<uint64_t>(raw);
  const uint64_t aligned = (start + granule() - 1) / granule() * granule();
  if (aligned > start) munmap(raw, aligned - start);
  if (aligned - start < slack) munmap(Pointer(aligned + bytes), slack - (aligned - start));
  return aligned;
}

void HostBackend::DoFree(uint64_t address, uint64_t bytes) {
  if (munmap(Pointer(address), bytes) != 0) ThrowErrno("munmap");
}

uint64_t HostBackend::DoCreate() {
  const bool reuse = !holes_.empty();
  const uint64_t offset = reuse ? holes_.back() : end_;
  // Allocates the pages now: a host out of memory is an error here, not a fault at the first write.
  if (fallocate(file_, 0, static_cast<off_t>(offset), static_cast<off_t>(granule())) != 0) ThrowErrno("fallocate");
  if (reuse) {
    holes_.pop_back();
  } else {
    end_ += granule();
  }
  return offset;
}

void HostBackend::DoDestroy(uint64_t handle) {
  holes_.reserve(holes_.size() + 1);
  const int mode = FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE;
  if (fallocate(file_, mode, static_cast<off_t>(handle), static_cast<off_t>(granule())) != 0) ThrowErrno("fallocate");
  holes_.push_back(handle);
}

void HostBackend::DoMap(uint64_t address, uint64_t handle) {
  void* mapped = mmap(Pointer(address), granule(), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file_,
                      static_cast<off_t>(handle));
  if (mapped == MAP_FAILED) ThrowErrno("mmap");
}

void HostBackend::DoUnmap(uint64_t address) {
  void* mapped =
      mmap(Pointer(address), granule(), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  if (mapped == MAP_FAILED) ThrowErrno("mmap");
}

void HostBackend::DoSetAccess(uint64_t, uint64_t) {}  // a host mapping is made with its access

}  // namespace onnx_kv::memory
