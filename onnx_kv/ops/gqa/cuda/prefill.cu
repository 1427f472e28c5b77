// Prefill: several new tokens a row, on whatever is in the cache already. gqa_append has written them.
//
// A block serves one row, one KV head and ROWS of its queries, where a row of queries is (new token, query head of the
// group), token first: all heads of the group share each read of K and V. Flash attention (Dao, 2023): tiles of COLUMNS
// cached tokens pass through two stages of shared memory; softmax is kept online. Tokens that no query of the block sees are
// never addressed.
//
// Specialised by DTYPE, HEAD_DIM, WARPS, ROW_BLOCKS (blocks of 16 rows a warp), COLUMNS.

#include "onnx_kv/ops/gqa/cuda/head_vector.cuh"
#include "onnx_kv/ops/gqa/cuda/prefill_tile.cuh"
#include "onnx_kv/ops/gqa/cuda/softmax.cuh"

namespace {

constexpr int kThreads = 32 * WARPS;
constexpr int kWarpRows = 16 * ROW_BLOCKS;
constexpr int kRows = kWarpRows * WARPS;
constexpr int kQueryBytes = kRows * kRowPitch;
constexpr int kSideBytes = COLUMNS * kRowPitch;
constexpr int kStageBytes = 2 * kSideBytes;

// What a block works on. Query row i is new token i / group, head i % group of the KV head's group.
struct Place {
  int row;
  int kv_head;
  int group;
  int first_row;  // of the block's queries
  RowLengths lengths;

  __device__ __forceinline__ explicit Place(const onnx_kv::GqaParams& p)
      : row(blockIdx.z),
        kv_head(blockIdx.x),
        group(p.q_heads / p.kv_heads),
        first_row((gridDim.y - 1 - blockIdx.y) * kRows),  // the longest work first
        lengths(ReadLengths(p, row)) {}

  __device__ __forceinline__ int Token(int i) const { return (first_row + i) / group; }
  __device__ __forceinline__ int Head(int i) const { return kv_head * group + (first_row + i) % group; }
  // Where the cache's tokens begin and end for query row i.
  __device__ __forceinline__ int End(int i) const { return lengths.past + min(Token(i), lengths.fresh - 1) + 1; }
  __device__ __forceinline__ int Begin(const onnx_kv::GqaParams& p, int i) const {
    return p.window > 0 ? max(0, lengths.past + Token(i) + 1 - p.window) : 0;
  }
};

// This warp's queries, normalised and rotated, into shared memory; zeros where there is none.
__device__ __forceinline__ void PrepareQueries(const onnx_kv::GqaParams& p, const Place& place, unsigned char* queries) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll 4
  for (int i = warp * kWarpRows; i < (warp + 1) * kWarpRows; ++i) {
    Element* target = reinterpret_cast<Element*>(queries + i * kRowPitch);
    const int token = place.Token(i);
    if (token >= place.lengths.fresh) {
      for (int chunk = lane; chunk < kPaddedChunks; chunk += 32) reinterpret_cast<uint4*>(target)[chunk] = uint4{};
      continue;
    }
    const Element* source = static_cast<const Element*>(p.query) +
                            (static_cast<int64_t>(place.row) * p.q_len + token) * p.query_token_stride +
                            place.Head(i) * HEAD_DIM;
    const RotaryPairs pairs(p, RotaryPosition(p, place.row, token, place.lengths.past), lane);
    HeadVector vector;
    vector.Load(source, pairs, lane);
    vector.Normalise(p.q_norm_weight, p.q_norm_epsilon, pairs, lane);
    vector.Store(target, pairs, lane);
    if (HEAD_DIM % 16 != 0 && lane < kPaddedChunks - kRowChunks) {
      reinterpret_cast<uint4*>(target)[kRowChunks + lane] = uint4{};
    }
  }
}

// Starts the copies of one side of the tile that begins at `token`; rows from `end` on become zeros.
__device__ __forceinline__ void Fetch(const Element* cache, int64_t stride, int token, int end, unsigned char* target) {
#pragma unroll
  for (int i = 0; i < (COLUMNS * kPaddedChunks + kThreads - 1) / kThreads; ++i) {
    const int index = i * kThreads + threadIdx.x, row = index / kPaddedChunks, chunk = index % kPaddedChunks;
    if (COLUMNS * kPaddedChunks % kThreads != 0 && row >= COLUMNS) continue;
    unsigned char* place = target + row * kRowPitch + chunk * 16;
    if (token + row < end && chunk < kRowChunks) {
      CopyAsync(SharedAddress(place), cache + (token + row) * stride + chunk * kChunkElements);
    } else {
      *reinterpret_cast<uint4*>(place) = uint4{};
    }
  }
}

// Online softmax of this lane's two rows in each block of 16.
struct RowState {
  float maximum[2];
  float sum[2];

  __device__ __forceinline__ RowState() : maximum{MinusInfinity(), MinusInfinity()}, sum{0, 0} {}

  // Scores (log2 units) become weights, and what was summed so far is rescaled.
  __device__ __forceinline__ void Weigh(ScoreBlocks& scores, OutputBlocks& output) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float highest = maximum[half];
#pragma unroll
      for (int column = 0; column < kColumnBlocks; ++column) {
        highest = fmaxf(highest, fmaxf(scores[column][2 * half], scores[column][2 * half + 1]));
      }
      highest = fmaxf(highest, __shfl_xor_sync(kFullWarp, highest, 1));
      highest = fmaxf(highest, __shfl_xor_sync(kFullWarp, highest, 2));
      const float base = FiniteBase(highest), factor = Exp2(maximum[half] - base);
      maximum[half] = highest;
      sum[half] *= factor;
#pragma unroll
      for (int column = 0; column < kColumnBlocks; ++column) {
#pragma unroll
        for (int i = 2 * half; i < 2 * half + 2; ++i) {
          scores[column][i] = Exp2(scores[column][i] - base);
          sum[half] += scores[column][i];
        }
      }
#pragma unroll
      for (int block = 0; block < kOutputBlocks; ++block) {
        output[block][2 * half] *= factor;
        output[block][2 * half + 1] *= factor;
      }
    }
  }
};

// Scales, biases and masks a warp's scores of the tile that begins at `token`.
__device__ __forceinline__ void Adjust(const onnx_kv::GqaParams& p, const Place& place, const ScoreScale& scale, int first,
                                       int token, bool masked, ScoreBlocks& scores) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int i = first + lane / 4 + half * 8;
    const bool exists = place.Token(i) < place.lengths.fresh;
    const int end = place.End(i), begin = place.Begin(p, i);
    const Element* bias = exists ? BiasRow(p, place.row, place.Head(i), place.Token(i)) : nullptr;
#pragma unroll
    for (int column = 0; column < kColumnBlocks; ++column) {
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        const int at = token + column * 8 + lane % 4 * 2 + side;
        float& score = scores[column][half * 2 + side];
        score = scale(score);
        if (bias != nullptr && at < end) score = AddBias(score, bias[at]);
        if (masked && (at < begin || at >= end)) score = MinusInfinity();
      }
    }
  }
}

// Writes a block of 16 rows of output; padding rows are zero.
__device__ __forceinline__ void StoreRows(const onnx_kv::GqaParams& p, const Place& place, int first, const RowState& state,
                                          const OutputBlocks& output) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int i = first + lane / 4 + half * 8, token = place.Token(i);
    float sum = state.sum[half];
    sum += __shfl_xor_sync(kFullWarp, sum, 1);
    sum += __shfl_xor_sync(kFullWarp, sum, 2);
    if (token >= p.q_len) continue;
    const float factor =
        token < place.lengths.fresh ? OutputFactor(p, place.Head(i), state.maximum[half], sum) : 0.0f;
    Element* target = static_cast<Element*>(p.output) +
                      ((static_cast<int64_t>(place.row) * p.q_len + token) * p.q_heads + place.Head(i)) * HEAD_DIM;
#pragma unroll
    for (int block = 0; block < kOutputBlocks; ++block) {
      const int element = block * 8 + lane % 4 * 2;
      if (element >= HEAD_DIM) continue;
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        target[element + side] = FromFloat(factor == 0 ? 0.0f : output[block][half * 2 + side] * factor);
      }
    }
  }
}

}  // namespace

// grid (KV heads, q_len * group / ROWS, batch)
extern "C" __global__ void __launch_bounds__(kThreads) gqa_prefill(const __grid_constant__ onnx_kv::GqaParams p) {
  extern __shared__ __align__(16) unsigned char work[];  // queries, then two stages of K and V
  WaitForPreviousKernel();
  const Place place(p);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const bool any = place.Token(0) < place.lengths.fresh;
  const int begin = any ? place.Begin(p, 0) : 0, end = any ? place.End(kRows - 1) : 0;
  const Element* keys = CacheRow(p.present_key, p.present, place.row, place.kv_head);
  const Element* values = CacheRow(p.present_value, p.present, place.row, place.kv_head);
  unsigned char* stages = work + kQueryBytes;
  auto fetch = [&](int token, int stage) {
    unsigned char* target = stages + stage * kStageBytes;
    if (token < end) Fetch(keys, p.present.seq, token, end, target);
    CommitCopies();
    if (token < end) Fetch(values, p.present.seq, token, end, target + kSideBytes);
    CommitCopies();
  };

  fetch(begin, 0);
  if (any) PrepareQueries(p, place, work);

  const ScoreScale scale(p);
  OutputBlocks output[ROW_BLOCKS] = {};
  RowState states[ROW_BLOCKS];
  const int first = warp * kWarpRows;
  const uint32_t queries = SharedAddress(work) + first * kRowPitch;
  for (int token = begin, stage = 0; token < end; token += COLUMNS, stage ^= 1) {
    __syncthreads();  // the other stage has been read
    fetch(token + COLUMNS, stage ^ 1);
    WaitCopies<3>();
    __syncthreads();
    const uint32_t tile = SharedAddress(stages) + stage * kStageBytes;
    ScoreBlocks scores[ROW_BLOCKS] = {};
    Scores(scores, queries, tile, lane);
    const bool masked = token + COLUMNS > place.End(0) || token < place.Begin(p, kRows - 1);
#pragma unroll
    for (int block = 0; block < ROW_BLOCKS; ++block) {
      Adjust(p, place, scale, first + block * 16, token, masked, scores[block]);
      states[block].Weigh(scores[block], output[block]);
    }
    WaitCopies<2>();
    __syncthreads();
    Accumulate(output, scores, tile + kSideBytes, lane);
  }
#pragma unroll
  for (int block = 0; block < ROW_BLOCKS; ++block) StoreRows(p, place, first + block * 16, states[block], output[block]);
}
