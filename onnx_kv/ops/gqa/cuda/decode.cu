// Decode: one new token a row. Rotate, append and attend in one kernel.
//
// A block serves one row, one KV head (all query heads of its group: K and V are read once) and one split of the row's
// tokens. Its warps take tiles of kTile tokens in turn, each through its own ring of asynchronous copies, and merge at the
// end; blocks merge through `workspace`: whichever takes a row's last ticket adds up the others' results in the order of
// the splits. Tokens beyond the live prefix are never addressed; the new token comes from shared memory.
//
// Specialised by DTYPE, HEAD_DIM, HEAD_TILES (blocks of 8 query heads), WARPS, STAGES, TILE.

#include "onnx_kv/ops/gqa/cuda/decode_plan.h"
#include "onnx_kv/ops/gqa/cuda/decode_tile.cuh"
#include "onnx_kv/ops/gqa/cuda/head_vector.cuh"
#include "onnx_kv/ops/gqa/cuda/softmax.cuh"

namespace {

using onnx_kv::kMostSplits;

constexpr int kHeads = 8 * HEAD_TILES;  // query heads of a block, padding included
constexpr int kThreads = 32 * WARPS;
constexpr int kUnit = WARPS * TILE;
constexpr int kSideBytes = TILE * kRowPitch;
constexpr int kStageBytes = 2 * kSideBytes;
constexpr int kRingBytes = STAGES * kStageBytes;  // a warp's
constexpr int kOutputPitch = kSteps * 16 + 4;     // floats of a head's row while warps merge: lanes hit different banks
constexpr int kPartialFloats = HEAD_DIM + 4;      // a head's result of one split: output, maximum, sum, padding

static_assert(HEAD_DIM % 8 == 0 && HEAD_DIM >= 32 && HEAD_DIM <= 256 && TILE % 16 == 0);

struct Shared {
  alignas(16) unsigned char queries[kHeads * kRowPitch];
  alignas(16) unsigned char fresh[2 * kRowPitch];  // the new token's K and V
  float maximum[WARPS][kHeads];
  float sum[WARPS][kHeads];
  float weight[kMostSplits][kHeads];
  bool last;
};

// One block's place: row, KV head, and the query heads it serves.
struct Place {
  int row;
  int kv_head;
  int first_head;
  int heads;
  bool appends;
  int index;  // among all (row, KV head, block of heads)

  __device__ __forceinline__ explicit Place(const onnx_kv::GqaParams& p) {
    const int group = p.q_heads / p.kv_heads, blocks = (group + kHeads - 1) / kHeads;
    row = blockIdx.z;
    kv_head = blockIdx.y / blocks;
    const int block = blockIdx.y % blocks;
    first_head = kv_head * group + block * kHeads;
    heads = min(kHeads, group - block * kHeads);
    appends = block == 0;
    index = blockIdx.z * gridDim.y + blockIdx.y;
  }
};

__device__ __forceinline__ void Zero(unsigned char* bytes, int count) {
  for (int i = threadIdx.x * 16; i < count; i += kThreads * 16) *reinterpret_cast<uint4*>(bytes + i) = uint4{};
}

// The queries, and in the split that ends the row the new K and V, into shared memory (and these into the cache).
__device__ __forceinline__ void PrepareToken(const onnx_kv::GqaParams& p, const Place& place, const RowLengths& lengths,
                                             bool last_split, Shared& shared) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const RotaryPairs pairs(p, RotaryPosition(p, place.row, 0, lengths.past), lane);
  const Element* query = static_cast<const Element*>(p.query) + place.row * p.query_token_stride +
                         static_cast<int64_t>(place.first_head) * HEAD_DIM;
  const int64_t fresh = place.row * p.kv_token_stride + place.kv_head * HEAD_DIM;
#pragma unroll
  for (int i = 0; i < (kHeads + WARPS - 1) / WARPS; ++i) {
    const int head = warp + i * WARPS;
    if (head >= place.heads) break;
    HeadVector vector;
    vector.Load(query + head * HEAD_DIM, pairs, lane);
    vector.Normalise(p.q_norm_weight, p.q_norm_epsilon, pairs, lane);
    vector.Store(reinterpret_cast<Element*>(shared.queries + head * kRowPitch), pairs, lane);
  }
  if (!last_split) return;
  const int64_t token = lengths.past * p.present.seq;
  if (warp == WARPS - 1) {
    Element* target = reinterpret_cast<Element*>(shared.fresh);
    HeadVector vector;
    vector.Load(static_cast<const Element*>(p.key) + fresh, pairs, lane);
    vector.Normalise(p.k_norm_weight, p.k_norm_epsilon, pairs, lane);
    vector.Store(target, pairs, lane);
    if (place.appends) {
      vector.Store(CacheRow(p.present_key, p.present, place.row, place.kv_head) + token, pairs, lane);
    }
  } else if (warp == 0) {
    for (int chunk = lane; chunk < kRowChunks; chunk += 32) {
      const uint4 value = reinterpret_cast<const uint4*>(static_cast<const Element*>(p.value) + fresh)[chunk];
      *reinterpret_cast<uint4*>(shared.fresh + kRowPitch + chunk * 16) = value;
      if (place.appends) {
        reinterpret_cast<uint4*>(CacheRow(p.present_value, p.present, place.row, place.kv_head) + token)[chunk] = value;
      }
    }
  }
}

// One warp's way through its tiles.
struct Stream {
  const Element* keys;  // the row's first token
  const Element* values;
  int64_t stride;
  int cached;  // tokens that may be read
  uint32_t ring;
  int lane;

  // Starts the copies of the tile that begins at `token`.
  __device__ __forceinline__ void Fetch(int token, int stage) const {
    const uint32_t target = ring + stage * kStageBytes;
    const int64_t base = token * stride;
#pragma unroll
    for (int i = 0; i < (TILE * kRowChunks + 31) / 32; ++i) {
      const int index = i * 32 + lane, row = index / kRowChunks, chunk = index % kRowChunks;
      if ((TILE * kRowChunks % 32 != 0 && row >= TILE) || token + row >= cached) continue;
      const int64_t offset = base + row * stride + chunk * kChunkElements;
      const uint32_t place = target + row * kRowPitch + chunk * 16;
      CopyAsync(place, keys + offset);
      CopyAsync(place + kSideBytes, values + offset);
    }
  }

  // Rows of a fetched tile that are not in the cache: the new token, then nothing (zeros, which the mask ignores).
  __device__ __forceinline__ void Complete(int token, int stage, const Shared& shared) const {
    const uint32_t target = ring + stage * kStageBytes;
    for (int index = lane; index < TILE * kRowChunks; index += 32) {
      const int row = index / kRowChunks, chunk = index % kRowChunks;
      if (token + row < cached) continue;
      const bool fresh = token + row == cached;
      const uint4 zero{};
      const uint32_t place = target + row * kRowPitch + chunk * 16;
      StoreShared(place, fresh ? *reinterpret_cast<const uint4*>(shared.fresh + chunk * 16) : zero);
      StoreShared(place + kSideBytes, fresh ? *reinterpret_cast<const uint4*>(shared.fresh + kRowPitch + chunk * 16) : zero);
    }
    __syncwarp();
  }
};

// Softmax state of up to 8 heads; element e of `output` belongs to head column 2c + e % 2.
struct HeadState {
  float output[kSteps][4];
  float maximum[2];
  float sum[2];  // of the tokens that this lane saw

  __device__ __forceinline__ HeadState() {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i) output[step][i] = 0;
    }
    maximum[0] = maximum[1] = MinusInfinity();
    sum[0] = sum[1] = 0;
  }

  // Takes in TILE scores a head (log2 units): they become weights, and what was summed so far is rescaled.
  __device__ __forceinline__ void Weigh(float (&scores)[TILE / 16][4]) {
    float factor[2];
#pragma unroll
    for (int column = 0; column < 2; ++column) {
      float highest = maximum[column];
#pragma unroll
      for (int block = 0; block < TILE / 16; ++block) {
        highest = fmaxf(highest, fmaxf(scores[block][column], scores[block][column + 2]));
      }
      highest = MaxOverLanes(highest, 4);
      const float base = FiniteBase(highest);
      factor[column] = Exp2(maximum[column] - base);
      maximum[column] = highest;
      sum[column] *= factor[column];
#pragma unroll
      for (int block = 0; block < TILE / 16; ++block) {
        scores[block][column] = Exp2(scores[block][column] - base);
        scores[block][column + 2] = Exp2(scores[block][column + 2] - base);
        sum[column] += scores[block][column] + scores[block][column + 2];
      }
    }
    if (__any_sync(kFullWarp, factor[0] != 1.0f || factor[1] != 1.0f)) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
#pragma unroll
        for (int i = 0; i < 4; ++i) output[step][i] *= factor[i % 2];
      }
    }
  }
};

// A warp's tile, in shared memory, against all heads of the block.
__device__ __forceinline__ void AttendTile(const onnx_kv::GqaParams& p, const Place& place, const ScoreScale& scale, int token,
                                           int total, uint32_t tile, uint32_t queries, HeadState (&heads)[HEAD_TILES]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int head_tile = 0; head_tile < HEAD_TILES; ++head_tile) {
    float scores[TILE / 16][4] = {};
#pragma unroll
    for (int block = 0; block < TILE / 16; ++block) {
      Scores(scores[block], tile + block * 16 * kRowPitch, queries + head_tile * 8 * kRowPitch, lane);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int column = token + block * 16 + lane / 4 + i / 2 * 8;
        const int head = head_tile * 8 + lane % 4 * 2 + i % 2;
        float score = scale(scores[block][i]);
        if (p.attention_bias != nullptr && column < total && head < place.heads) {
          score = AddBias(score, BiasRow(p, place.row, place.first_head + head, 0)[column]);
        }
        scores[block][i] = column < total ? score : MinusInfinity();
      }
    }
    heads[head_tile].Weigh(scores);
#pragma unroll
    for (int block = 0; block < TILE / 16; ++block) {
      Accumulate(heads[head_tile].output, scores[block], tile + kSideBytes + block * 16 * kRowPitch, lane);
    }
  }
}

// Leaves every warp's state in shared memory: outputs in `merge`, [WARPS][kHeads][kOutputPitch].
__device__ __forceinline__ void Publish(HeadState (&heads)[HEAD_TILES], Shared& shared, float* merge) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int head_tile = 0; head_tile < HEAD_TILES; ++head_tile) {
    HeadState& state = heads[head_tile];
#pragma unroll
    for (int column = 0; column < 2; ++column) {
      const int head = head_tile * 8 + lane % 4 * 2 + column;
      const float sum = SumOverLanes(state.sum[column], 4);
      if (lane / 4 == 0) {
        shared.maximum[warp][head] = state.maximum[column];
        shared.sum[warp][head] = sum;
      }
      float* row = merge + (warp * kHeads + head) * kOutputPitch + lane / 4;
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        row[step * 16] = state.output[step][column];
        row[step * 16 + 8] = state.output[step][column + 2];
      }
    }
  }
}

// The warps' states as one: this head's maximum and sum, and each warp's factor.
struct Merged {
  float maximum;
  float sum;
  float factor[WARPS];

  __device__ __forceinline__ Merged(const Shared& shared, int head) : maximum(MinusInfinity()), sum(0) {
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) maximum = fmaxf(maximum, shared.maximum[warp][head]);
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) {
      factor[warp] = Exp2(shared.maximum[warp][head] - FiniteBase(maximum));
      sum += shared.sum[warp][head] * factor[warp];
    }
  }
};

__device__ __forceinline__ void StoreOutput(const onnx_kv::GqaParams& p, const Place& place, int head, int element,
                                            const float (&values)[4]) {
  Element* target = static_cast<Element*>(p.output) +
                    (static_cast<int64_t>(place.row) * p.q_heads + place.first_head + head) * HEAD_DIM + element;
#pragma unroll
  for (int i = 0; i < 4; ++i) target[i] = FromFloat(values[i]);
}

__device__ __forceinline__ void AddScaled(float (&sum)[4], float4 values, float factor) {
  sum[0] = fmaf(values.x, factor, sum[0]);
  sum[1] = fmaf(values.y, factor, sum[1]);
  sum[2] = fmaf(values.z, factor, sum[2]);
  sum[3] = fmaf(values.w, factor, sum[3]);
}

// Merges the warps. With one split this is the output; otherwise the result goes to `partial`, [kHeads][kPartialFloats].
__device__ __forceinline__ void MergeWarps(const onnx_kv::GqaParams& p, const Place& place, const Shared& shared,
                                           const float* merge, bool only_split, float* partial) {
  for (int item = threadIdx.x; item < place.heads * (HEAD_DIM / 4); item += kThreads) {
    const int head = item / (HEAD_DIM / 4), element = item % (HEAD_DIM / 4) * 4;
    const Merged merged(shared, head);
    float values[4] = {};
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) {
      AddScaled(values, *reinterpret_cast<const float4*>(merge + (warp * kHeads + head) * kOutputPitch + element),
                merged.factor[warp]);
    }
    if (only_split) {
      const float factor = OutputFactor(p, place.first_head + head, merged.maximum, merged.sum);
#pragma unroll
      for (int i = 0; i < 4; ++i) values[i] *= factor;
      StoreOutput(p, place, head, element, values);
      continue;
    }
    float* target = partial + head * kPartialFloats;
    *reinterpret_cast<float4*>(target + element) = float4{values[0], values[1], values[2], values[3]};
    if (element == 0) *reinterpret_cast<float2*>(target + HEAD_DIM) = float2{merged.maximum, merged.sum};
  }
}

// Merges the splits' results, in their order, into the output.
__device__ __forceinline__ void MergeSplits(const onnx_kv::GqaParams& p, const Place& place, Shared& shared,
                                            const float* partials, int splits) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int head = warp; head < place.heads; head += WARPS) {
    float2 stats[kMostSplits / 32];  // maximum, sum
    float maximum = MinusInfinity();
#pragma unroll
    for (int i = 0; i < kMostSplits / 32; ++i) {
      const int split = lane + 32 * i;
      stats[i] = {MinusInfinity(), 0};
      if (split < splits) stats[i] = LoadFresh2(partials + (split * kHeads + head) * kPartialFloats + HEAD_DIM);
      maximum = fmaxf(maximum, stats[i].x);
    }
    maximum = MaxOverLanes(maximum, 1);
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kMostSplits / 32; ++i) {
      stats[i].x = Exp2(stats[i].x - FiniteBase(maximum));
      sum += stats[i].x * stats[i].y;
    }
    const float factor = OutputFactor(p, place.first_head + head, maximum, SumOverLanes(sum, 1));
#pragma unroll
    for (int i = 0; i < kMostSplits / 32; ++i) {
      if (lane + 32 * i < splits) shared.weight[lane + 32 * i][head] = stats[i].x * factor;
    }
  }
  __syncthreads();
  for (int item = threadIdx.x; item < place.heads * (HEAD_DIM / 4); item += kThreads) {
    const int head = item / (HEAD_DIM / 4), element = item % (HEAD_DIM / 4) * 4;
    float values[4] = {};
#pragma unroll 8
    for (int split = 0; split < splits; ++split) {
      AddScaled(values, LoadFresh(partials + (split * kHeads + head) * kPartialFloats + element), shared.weight[split][head]);
    }
    StoreOutput(p, place, head, element, values);
  }
}

}  // namespace

// grid (splits of the longest row, KV heads x blocks of query heads, batch). `workspace` is
// [place][gridDim.x][kHeads][kPartialFloats]; `tickets` is [place], zero before and after.
extern "C" __global__ void __launch_bounds__(kThreads)
    gqa_decode(const __grid_constant__ onnx_kv::GqaParams p, float* workspace, uint32_t* tickets, int most_splits) {
  extern __shared__ __align__(16) unsigned char work[];
  __shared__ Shared shared;
  const Place place(p);
  const RowLengths lengths = ReadLengths(p, place.row);
  const int window_start = p.window > 0 ? max(0, lengths.total - p.window) : 0;
  const onnx_kv::Splits splits = onnx_kv::SplitsOf(lengths.total - window_start, most_splits, kUnit);
  const int split = blockIdx.x;
  if (lengths.fresh == 0) {
    if (split == 0) {
      const float zeros[4] = {};
      for (int i = threadIdx.x * 4; i < place.heads * HEAD_DIM; i += kThreads * 4) {
        StoreOutput(p, place, i / HEAD_DIM, i % HEAD_DIM, zeros);
      }
    }
    return;
  }
  if (split >= splits.count) return;

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int begin = window_start + split * splits.tokens;
  const int end = min(begin + splits.tokens, lengths.total);
  const Stream stream = {CacheRow(p.present_key, p.present, place.row, place.kv_head),
                         CacheRow(p.present_value, p.present, place.row, place.kv_head),
                         p.present.seq,
                         lengths.past,
                         SharedAddress(work) + warp * kRingBytes,
                         lane};
  if constexpr (HEAD_DIM % 16 != 0) {
    Zero(work, WARPS * kRingBytes);
    __syncthreads();
  }
  int next = begin + warp * TILE;  // the tile to fetch next
#pragma unroll
  for (int stage = 0; stage < STAGES - 1; ++stage, next += kUnit) {
    if (next < end) stream.Fetch(next, stage);
    CommitCopies();
  }
  if (place.heads < kHeads || HEAD_DIM % 16 != 0) {
    Zero(shared.queries, sizeof shared.queries);
    __syncthreads();
  }
  PrepareToken(p, place, lengths, split == splits.count - 1, shared);
  __syncthreads();

  const ScoreScale scale(p);
  HeadState heads[HEAD_TILES];
  int stage = 0, free = STAGES - 1;
  for (int token = begin + warp * TILE; token < end; token += kUnit, next += kUnit) {
    WaitCopies<STAGES - 2>();
    __syncwarp();
    if (next < end) stream.Fetch(next, free);
    CommitCopies();
    if (token + TILE > lengths.past) stream.Complete(token, stage, shared);
    AttendTile(p, place, scale, token, lengths.total, stream.ring + stage * kStageBytes, SharedAddress(shared.queries), heads);
    free = stage;
    stage = stage + 1 == STAGES ? 0 : stage + 1;
  }

  __syncthreads();
  float* merge = reinterpret_cast<float*>(work);
  Publish(heads, shared, merge);
  __syncthreads();
  float* partials = workspace + static_cast<int64_t>(place.index) * gridDim.x * kHeads * kPartialFloats;
  MergeWarps(p, place, shared, merge, splits.count == 1, partials + split * kHeads * kPartialFloats);
  if (splits.count == 1) return;
  __syncthreads();
  if (threadIdx.x == 0) {
    shared.last = TakeTicket(tickets + place.index, splits.count - 1) == static_cast<uint32_t>(splits.count - 1);
  }
  __syncthreads();
  if (shared.last) MergeSplits(p, place, shared, partials, splits.count);
}
