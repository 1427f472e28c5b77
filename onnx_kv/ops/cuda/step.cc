// Launches the step kernel (step.cu).
#include <algorithm>

#include "onnx_kv/ops/capi.h"
#include "onnx_kv/ops/cuda/device.h"
#include "onnx_kv/ops/cuda/modules.h"
#include "onnx_kv/ops/cuda/step_params.cuh"

namespace onnx_kv::cuda {
namespace {

// Enough blocks to read a row of 150,000 logits at full width; more would only wait for the last one.
constexpr int kMaxBlocks = 64;

unsigned BlocksPerRow(int32_t vocab) { return std::clamp(vocab / (2 * kStepThreads), 1, kMaxBlocks); }

void Launch(const OnnxKvChoice& choice, CUstream stream) {
  CUfunction kernel = LoadKernel({"onnx_kv/ops/cuda/step.cu", {"DTYPE=" + std::to_string(choice.dtype)}},
                                 "choose_and_advance", 0, stream);
  const unsigned blocks = BlocksPerRow(choice.vocab);
  uint64_t logits = choice.logits;
  int64_t row_stride = choice.row_stride;
  int32_t vocab = choice.vocab;
  uint64_t partial = choice.workspace;
  uint64_t tickets = partial + sizeof(uint64_t) * blocks * choice.batch;
  Sampling sampling{choice.temperature, choice.top_k, choice.top_p, choice.seed};
  StepState state{reinterpret_cast<int64_t*>(choice.input_ids),
                  reinterpret_cast<int64_t*>(choice.position_ids),
                  reinterpret_cast<int32_t*>(choice.seqlens_k),
                  reinterpret_cast<int64_t*>(choice.attention_mask),
                  choice.mask_stride,
                  reinterpret_cast<int64_t*>(choice.ring),
                  choice.ring_size,
                  reinterpret_cast<int32_t*>(choice.steps),
                  reinterpret_cast<const int32_t*>(choice.live)};
  void* arguments[] = {&logits, &row_stride, &vocab, &partial, &tickets, &sampling, &state};
  CU_CHECK(cuLaunchKernel, kernel, blocks, choice.batch, 1, kStepThreads, 1, 1, 0, stream, arguments, nullptr);
}

void CheckChoice(const OnnxKvChoice& choice) {
  if (choice.dtype < 0 || choice.dtype > 2) {
    throw Error(ONNX_KV_INVALID_ARGUMENT, "logits have no dtype " + std::to_string(choice.dtype));
  }
  if (choice.batch < 1 || choice.batch > 65535 || choice.vocab < 1 || choice.ring_size < 1) {
    throw Error(ONNX_KV_INVALID_ARGUMENT, "a choice needs 1 to 65,535 rows, a vocabulary and room for a token");
  }
}

}  // namespace
}  // namespace onnx_kv::cuda

OnnxKvStatus onnx_kv_cuda_choice_workspace(int32_t batch, int32_t vocab, uint64_t* bytes) {
  return onnx_kv::Guard([&] {
    *bytes = static_cast<uint64_t>(batch) * (sizeof(uint64_t) * onnx_kv::cuda::BlocksPerRow(vocab) + sizeof(uint32_t));
  });
}

OnnxKvStatus onnx_kv_cuda_choose(int32_t device, void* stream, const OnnxKvChoice* choice) {
  return onnx_kv::Guard([&] {
    onnx_kv::cuda::CheckChoice(*choice);
    onnx_kv::cuda::UseDevice use(device);
    onnx_kv::cuda::Launch(*choice, static_cast<CUstream>(stream));
  });
}
