// What a decode step does around the model, on the device: choose the next token of every row from its logits, then write it
// where the next step reads it. One kernel a step: the block that finishes a row last chooses and advances.
//
// Sums of probabilities are 64-bit fixed point, so that atomics add up to the same value in whatever order they come: a
// seed gives the same tokens run to run.

#include "onnx_kv/ops/cuda/element.cuh"
#include "onnx_kv/ops/cuda/step_params.cuh"

using uint32 = uint32_t;
using uint64 = unsigned long long;  // as atomicAdd spells it
using onnx_kv::cuda::Sampling;
using onnx_kv::cuda::StepState;

namespace {

constexpr int kThreads = onnx_kv::cuda::kStepThreads;
constexpr int kWarps = kThreads / 32;
constexpr int kBins = 256;

// Orders floats as unsigned integers: larger logit, larger key. NaN counts as the largest, so that it is never overlooked.
__device__ __forceinline__ uint32 Key(float value) {
  if (value != value) return 0xffffffffu;
  const uint32 bits = __float_as_uint(value);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float FromKey(uint32 key) {
  return __uint_as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key);
}

// Larger logit first, then the lower index: a total order, so every reduction tree finds the same token.
__device__ __forceinline__ uint64 Pack(uint32 key, uint32 index) {
  return static_cast<uint64>(key) << 32 | (0xffffffffu - index);
}

__device__ __forceinline__ uint64 WarpMax(uint64 value) {
  for (int offset = 16; offset > 0; offset >>= 1) {
    const uint64 other = __shfl_xor_sync(0xffffffffu, value, offset);
    value = other > value ? other : value;
  }
  return value;
}

__device__ uint64 BlockMax(uint64 value, uint64* scratch) {
  value = WarpMax(value);
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = value;
  __syncthreads();
  if (threadIdx.x < 32) {
    value = WarpMax(threadIdx.x < kWarps ? scratch[threadIdx.x] : 0);
    if (threadIdx.x == 0) scratch[0] = value;
  }
  __syncthreads();
  value = scratch[0];
  __syncthreads();
  return value;
}

// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011): 64 random bits of (seed, row, step).
__device__ uint64 Random(uint64 seed, uint32 row, uint32 step) {
  uint32 counter[4] = {step, row, 0, 0};
  uint32 key[2] = {static_cast<uint32>(seed), static_cast<uint32>(seed >> 32)};
  for (int round = 0; round < 10; ++round) {
    const uint64 a = 0xD2511F53ull * counter[0], b = 0xCD9E8D57ull * counter[2];
    const uint32 next[4] = {static_cast<uint32>(b >> 32) ^ counter[1] ^ key[0], static_cast<uint32>(b),
                            static_cast<uint32>(a >> 32) ^ counter[3] ^ key[1], static_cast<uint32>(a)};
    for (int i = 0; i < 4; ++i) counter[i] = next[i];
    key[0] += 0x9E3779B9u;
    key[1] += 0xBB67AE85u;
  }
  return static_cast<uint64>(counter[0]) << 32 | counter[1];
}

// exp((logit - max) / temperature) in units of 2^-40; 151,936 tokens sum to less than 2^58.
__device__ __forceinline__ uint64 Mass(uint32 key, float highest, float inverse_temperature) {
  if (key == 0) return 0;
  return static_cast<uint64>(__expf((FromKey(key) - highest) * inverse_temperature) * 1099511627776.0f);
}

// The smallest key whose tokens of this key or a larger one weigh at least `target`, by a radix search of 4 × 8 bits.
// Every token weighs 1 (for top-k) or its probability mass (for top-p). Only keys >= `floor` count.
template <typename Weight>
__device__ uint32 Threshold(const Element* row, int vocab, uint32 floor, uint64 target, uint64* bins, Weight weight) {
  __shared__ uint32 prefix;
  __shared__ uint64 above;
  if (threadIdx.x == 0) prefix = 0, above = 0;
  for (int shift = 24; shift >= 0; shift -= 8) {
    for (int bin = threadIdx.x; bin < kBins; bin += kThreads) bins[bin] = 0;
    __syncthreads();
    const uint32 mask = shift == 24 ? 0 : 0xffffffffu << (shift + 8);
    for (int i = threadIdx.x; i < vocab; i += kThreads) {
      const uint32 key = Key(ToFloat(row[i]));
      if (key >= floor && (key & mask) == prefix) atomicAdd(&bins[key >> shift & 255], weight(key));
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      int bin = kBins - 1;
      while (bin > 0 && above + bins[bin] < target) above += bins[bin--];
      prefix |= static_cast<uint32>(bin) << shift;
    }
    __syncthreads();
  }
  const uint32 found = prefix > floor ? prefix : floor;
  __syncthreads();
  return found;
}

// Draws a token among those with key >= `floor`, in the order of their indices.
__device__ uint32 Draw(const Element* row, int vocab, uint32 floor, float highest, float inverse_temperature, uint64 random,
                       uint32 fallback, uint64* scratch) {
  __shared__ uint32 chosen;
  const int chunk = (vocab + kThreads - 1) / kThreads, begin = threadIdx.x * chunk, end = min(begin + chunk, vocab);
  uint64 own = 0;
  for (int i = begin; i < end; ++i) {
    const uint32 key = Key(ToFloat(row[i]));
    if (key >= floor) own += Mass(key, highest, inverse_temperature);
  }
  uint64 upto = own;  // inclusive prefix sum over the block
  for (int offset = 1; offset < 32; offset <<= 1) {
    const uint64 other = __shfl_up_sync(0xffffffffu, upto, offset);
    if (threadIdx.x % 32 >= offset) upto += other;
  }
  if (threadIdx.x % 32 == 31) scratch[threadIdx.x / 32] = upto;
  if (threadIdx.x == 0) chosen = fallback;
  __syncthreads();
  uint64 total = 0;
  for (int warp = 0; warp < kWarps; ++warp) {
    if (warp < threadIdx.x / 32) upto += scratch[warp];
    total += scratch[warp];
  }
  const uint64 goal = __umul64hi(random, total);  // uniform in [0, total)
  if (upto - own <= goal && goal < upto) {
    uint64 sum = upto - own;
    for (int i = begin; i < end; ++i) {
      const uint32 key = Key(ToFloat(row[i]));
      if (key >= floor) sum += Mass(key, highest, inverse_temperature);
      if (sum > goal) {
        chosen = i;
        break;
      }
    }
  }
  __syncthreads();
  return chosen;
}

__device__ uint32 Sample(const Element* row, int vocab, const Sampling& params, uint64 best, uint32 row_index,
                         uint32 step, uint64* scratch) {
  const uint32 best_index = 0xffffffffu - static_cast<uint32>(best);
  const float highest = FromKey(static_cast<uint32>(best >> 32)), inverse = 1.0f / params.temperature;
  uint32 floor = 1;
  if (params.top_k > 0 && params.top_k < vocab) {
    floor = Threshold(row, vocab, floor, params.top_k, scratch, [](uint32) { return 1ull; });
  }
  if (params.top_p < 1.0f) {
    auto mass = [=](uint32 key) { return Mass(key, highest, inverse); };
    __shared__ uint64 total;
    if (threadIdx.x == 0) total = 0;
    __syncthreads();
    uint64 own = 0;
    for (int i = threadIdx.x; i < vocab; i += kThreads) {
      const uint32 key = Key(ToFloat(row[i]));
      if (key >= floor) own += mass(key);
    }
    atomicAdd(&total, own);
    __syncthreads();
    const uint64 target = static_cast<uint64>(static_cast<double>(total) * params.top_p);
    floor = Threshold(row, vocab, floor, target > 0 ? target : 1, scratch, mass);
  }
  return Draw(row, vocab, floor, highest, inverse, Random(params.seed, row_index, step), best_index, scratch);
}

// Whether a row whose largest key is this has a token to choose: not with NaN or +inf, nor with -inf alone.
__device__ __forceinline__ bool CanChoose(uint32 largest) { return largest > 0x007fffffu && largest < 0xff800000u; }

__device__ void Advance(const StepState& state, int row, int64_t token) {
  const int step = state.steps[row]++;
  state.ring[static_cast<int64_t>(row) * state.ring_size + step % state.ring_size] = token;
  state.input_ids[row] = token == onnx_kv::cuda::kNoToken ? 0 : token;  // the host will see it; the model must not
  const int64_t place = ++state.seqlens_k[row];
  if (state.position_ids != nullptr) ++state.position_ids[row];
  if (state.attention_mask != nullptr && place < state.mask_stride) {
    state.attention_mask[row * state.mask_stride + place] = 1;
  }
}

}  // namespace

// grid (blocks, batch), kThreads threads. `partial` is [batch, blocks]; `tickets` is [batch], zero before the first launch and left zero.
// Row r of the logits begins at r * row_stride elements.
extern "C" __global__ void __launch_bounds__(kThreads)
    choose_and_advance(const Element* logits, int64_t row_stride, int vocab, uint64* partial, uint32* tickets,
                       Sampling params, StepState state) {
  __shared__ uint64 scratch[kBins];
  __shared__ bool last;
  const int row = blockIdx.y, blocks = gridDim.x;
  const Element* values = logits + row * row_stride;

  uint64 best = 0;
  for (int i = blockIdx.x * kThreads + threadIdx.x; i < vocab; i += blocks * kThreads) {
    const uint64 candidate = Pack(Key(ToFloat(values[i])), i);
    best = candidate > best ? candidate : best;
  }
  best = BlockMax(best, scratch);
  if (threadIdx.x == 0) {
    partial[row * blocks + blockIdx.x] = best;
    __threadfence();
    last = atomicAdd(&tickets[row], 1) == blocks - 1;
    __threadfence();
  }
  __syncthreads();
  if (!last) return;

  best = 0;
  for (int i = threadIdx.x; i < blocks; i += kThreads) {
    const uint64 candidate = *const_cast<volatile uint64*>(&partial[row * blocks + i]);
    best = candidate > best ? candidate : best;
  }
  best = BlockMax(best, scratch);
  int64_t token = onnx_kv::cuda::kNoToken;
  if (CanChoose(static_cast<uint32>(best >> 32))) {
    token = params.temperature > 0 ? Sample(values, vocab, params, best, row, state.steps[row], scratch)
                                   : 0xffffffffu - static_cast<uint32>(best);
  }
  if (threadIdx.x == 0) {
    tickets[row] = 0;
    if (state.live == nullptr || state.live[row] != 0) Advance(state, row, token);
  }
}
