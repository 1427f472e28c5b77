// Ordered moves within device memory, with memmove's rule: source and destination may overlap.
#include <algorithm>

#include "onnx_kv/ops/capi.h"
#include "onnx_kv/ops/cuda/device.h"

namespace onnx_kv::cuda {
namespace {

constexpr uint64_t kMaxScratch = uint64_t{32} << 20;

bool Overlaps(const OnnxKvMove& move) {
  const uint64_t distance = std::max(move.source, move.destination) - std::min(move.source, move.destination);
  return distance != 0 && distance < move.bytes;
}

// Plain device memory, freed once the stream no longer uses it.
class Scratch {
 public:
  Scratch(uint64_t bytes, CUstream stream) : bytes_(bytes), stream_(stream) {
    if (bytes != 0) CU_CHECK(cuMemAlloc, &address_, bytes);
  }
  ~Scratch() {
    if (address_ == 0) return;
    Driver().cuStreamSynchronize(stream_);
    Driver().cuMemFree(address_);
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  CUdeviceptr address() const { return address_; }
  uint64_t bytes() const { return bytes_; }

 private:
  CUdeviceptr address_ = 0;
  uint64_t bytes_;
  CUstream stream_;
};

// Piece by piece through `scratch`, beginning at the end that the destination lies towards.
void MoveOverlapping(const OnnxKvMove& move, const Scratch& scratch, CUstream stream) {
  const bool upward = move.destination > move.source;
  for (uint64_t done = 0; done < move.bytes;) {
    const uint64_t piece = std::min(scratch.bytes(), move.bytes - done);
    const uint64_t offset = upward ? move.bytes - done - piece : done;
    CU_CHECK(cuMemcpyDtoDAsync, scratch.address(), move.source + offset, piece, stream);
    CU_CHECK(cuMemcpyDtoDAsync, move.destination + offset, scratch.address(), piece, stream);
    done += piece;
  }
}

void Move(const OnnxKvMove* moves, uint64_t count, CUstream stream) {
  uint64_t largest = 0;
  for (uint64_t i = 0; i < count; ++i) {
    if (Overlaps(moves[i])) largest = std::max(largest, moves[i].bytes);
  }
  const Scratch scratch(std::min(largest, kMaxScratch), stream);
  for (uint64_t i = 0; i < count; ++i) {
    if (Overlaps(moves[i])) {
      MoveOverlapping(moves[i], scratch, stream);
    } else if (moves[i].bytes != 0) {
      CU_CHECK(cuMemcpyDtoDAsync, moves[i].destination, moves[i].source, moves[i].bytes, stream);
    }
  }
}

}  // namespace
}  // namespace onnx_kv::cuda

OnnxKvStatus onnx_kv_cuda_move(int32_t device, void* stream, const OnnxKvMove* moves, uint64_t count) {
  return onnx_kv::Guard([&] {
    onnx_kv::cuda::UseDevice use(device);
    onnx_kv::cuda::Move(moves, count, static_cast<CUstream>(stream));
  });
}
