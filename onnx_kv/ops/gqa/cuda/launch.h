// GroupQueryAttention on the GPU: what the operator calls.
#pragma once

#include <cuda.h>

#include "onnx_kv/ops/gqa/params.h"

namespace onnx_kv::cuda {

// Enqueues one call on `stream`, in the context that is current on this thread. Every pointer in `params` is a device
// pointer; lengths are read by the kernels, so that a capture of this call is right for every length from 1 to the
// capacity. Lengths out of range are clamped: tokens = clamp(seqlens_k + 1, 0, present_capacity),
// new = clamp(query_seqlens, 0, min(q_len, tokens)); output rows of padding are zero.
//
// The first call for a (device, dtype, head size, …) compiles and loads its kernels, and the first call on a stream
// allocates its workspace: neither is possible while `stream` is being captured, which throws Error
// (ONNX_KV_UNSUPPORTED) that says to run once before capturing. Nothing else allocates, and nothing synchronises.
void LaunchGqa(const GqaParams& params, CUstream stream);

}  // namespace onnx_kv::cuda
