// Decode: one new token a row. Rotate, append and attend in one kernel.
//
// A block serves one row, one KV head (all query heads of its group: K and V are read once) and one split of the row's
// tokens. Its warps take tiles of kTile tokens in turn, each through its own ring of asynchronous copies, and merge at the
// end; blocks of a cluster merge through each other's shared memory, clusters through `workspace`, always in the order of
// the splits. Tokens beyond the live prefix are never addressed; the new token comes from shared memory.
//
// Specialised by DTYPE, HEAD_DIM, HEAD_TILES (blocks of 8 query heads), WARPS, STAGES, TILE, BULK, CLUSTER.

#include "onnx_kv/ops/gqa/cuda/decode_plan.h"
#include "onnx_kv/ops/gqa/cuda/decode_stream.cuh"
#include "onnx_kv/ops/gqa/cuda/decode_tile.cuh"
#include "onnx_kv/ops/gqa/cuda/head_vector.cuh"
#include "onnx_kv/ops/gqa/cuda/softmax.cuh"

namespace {

constexpr int kHeads = 8 * HEAD_TILES;  // query heads of a block, padding included
constexpr int kThreads = 32 * WARPS;
constexpr int kUnit = WARPS * TILE;
constexpr int kTokenBytes = 2 * HEAD_DIM * sizeof(Element);
constexpr int kOutputPitch = kSteps * 16 + 4;     // floats of a head's row while warps merge: lanes hit different banks
constexpr int kPartialFloats = HEAD_DIM + 4;      // a head's result: output, maximum, sum, padding

static_assert(HEAD_DIM % 8 == 0 && HEAD_DIM >= 32 && HEAD_DIM <= 256 && TILE % 16 == 0);

struct Shared {
  alignas(16) unsigned char queries[kHeads * kRowPitch];
  alignas(16) unsigned char fresh[2 * kRowPitch];  // the new token's K and V
  alignas(16) float result[kHeads][kPartialFloats];  // of the block's split
  float maximum[WARPS][kHeads];
  float sum[WARPS][kHeads];
  uint64_t barriers[WARPS][STAGES];
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

// Merges the warps' states into the block's result.
__device__ __forceinline__ void MergeWarps(const Place& place, Shared& shared, const float* merge) {
  for (int item = threadIdx.x; item < place.heads * (HEAD_DIM / 4); item += kThreads) {
    const int head = item / (HEAD_DIM / 4), element = item % (HEAD_DIM / 4) * 4;
    const Merged merged(shared, head);
    float values[4] = {};
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) {
      AddScaled(values, *reinterpret_cast<const float4*>(merge + (warp * kHeads + head) * kOutputPitch + element),
                merged.factor[warp]);
    }
    *reinterpret_cast<float4*>(&shared.result[head][element]) = float4{values[0], values[1], values[2], values[3]};
    if (element == 0) *reinterpret_cast<float2*>(&shared.result[head][HEAD_DIM]) = float2{merged.maximum, merged.sum};
  }
}

// Four elements of one head's output, merged from several results in a fixed order.
struct Merging {
  float values[4] = {};
  float maximum = MinusInfinity();
  float sum = 0;

  __device__ __forceinline__ void Add(float4 part, float2 stats) {
    const float highest = fmaxf(maximum, stats.x), base = FiniteBase(highest);
    const float old = Exp2(maximum - base), own = Exp2(stats.x - base);
    maximum = highest;
    sum = sum * old + stats.y * own;
#pragma unroll
    for (int i = 0; i < 4; ++i) values[i] *= old;
    AddScaled(values, part, own);
  }
};

// Merges the results of the cluster's first `members` blocks.
__device__ __forceinline__ Merging MergeCluster(const Shared& shared, int head, int element, int members) {
  float4 part[CLUSTER];
  float2 stats[CLUSTER];
#pragma unroll
  for (int i = 0; i < CLUSTER; ++i) {
    const int member = min(i, members - 1);
    part[i] = LoadCluster(ClusterAddress<CLUSTER>(&shared.result[head][element], member));
    stats[i] = LoadCluster2(ClusterAddress<CLUSTER>(&shared.result[head][HEAD_DIM], member));
  }
  Merging merging;
#pragma unroll
  for (int i = 0; i < CLUSTER; ++i) {
    if (i < members) merging.Add(part[i], stats[i]);
  }
  return merging;
}

// Where clusters leave an item: values and statistics, [cluster][item].
struct Exchange {
  float* base;
  int items;

  __device__ __forceinline__ float* At(int cluster, int item) const { return base + (static_cast<int64_t>(cluster) * items + item) * 8; }

  __device__ __forceinline__ void Store(int cluster, int item, const Merging& m) const {
    float* at = At(cluster, item);
    *reinterpret_cast<float4*>(at) = float4{m.values[0], m.values[1], m.values[2], m.values[3]};
    *reinterpret_cast<float2*>(at + 4) = float2{m.maximum, m.sum};
  }

  __device__ __forceinline__ Merging Merge(int item, int clusters) const {
    constexpr int kBatch = 8;  // clusters whose loads are under way together
    Merging merging;
    for (int first = 0; first < clusters; first += kBatch) {
      float4 part[kBatch];
      float2 stats[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const float* at = At(min(first + i, clusters - 1), item);
        part[i] = LoadFresh(at);
        stats[i] = LoadFresh2(at + 4);
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (first + i < clusters) merging.Add(part[i], stats[i]);
      }
    }
    return merging;
  }
};

__device__ __forceinline__ void Finish(const onnx_kv::GqaParams& p, const Place& place, int item, Merging& merging) {
  const int head = item / (HEAD_DIM / 4);
  const float factor = OutputFactor(p, place.first_head + head, merging.maximum, merging.sum);
#pragma unroll
  for (int i = 0; i < 4; ++i) merging.values[i] *= factor;
  StoreOutput(p, place, head, item % (HEAD_DIM / 4) * 4, merging.values);
}

// Merges the splits into the output. Every block of a cluster merges a share of the items over the cluster; where a row has
// several clusters, the last block to take a ticket of its share merges it over the clusters.
__device__ __forceinline__ void MergeSplits(const onnx_kv::GqaParams& p, const Place& place, Shared& shared, int splits,
                                            float* workspace, uint32_t* tickets) {
  const int rank = blockIdx.x % CLUSTER, cluster = blockIdx.x / CLUSTER;
  const int clusters = (splits + CLUSTER - 1) / CLUSTER, members = min(CLUSTER, splits - cluster * CLUSTER);
  const int items = place.heads * (HEAD_DIM / 4);
  const Exchange exchange = {workspace + static_cast<int64_t>(place.index) * (gridDim.x / CLUSTER) * kHeads * HEAD_DIM * 2, items};
  for (int item = rank + threadIdx.x * CLUSTER; item < items; item += kThreads * CLUSTER) {
    Merging merging = MergeCluster(shared, item / (HEAD_DIM / 4), item % (HEAD_DIM / 4) * 4, members);
    if (clusters == 1) {
      Finish(p, place, item, merging);
    } else {
      exchange.Store(cluster, item, merging);
    }
  }
  if (clusters == 1) return;
  __syncthreads();
  if (threadIdx.x == 0) {
    shared.last = TakeTicket(tickets + place.index * CLUSTER + rank, clusters - 1) == static_cast<uint32_t>(clusters - 1);
  }
  __syncthreads();
  if (!shared.last) return;
  for (int item = rank + threadIdx.x * CLUSTER; item < items; item += kThreads * CLUSTER) {
    Merging merging = exchange.Merge(item, clusters);
    Finish(p, place, item, merging);
  }
}

// Leaves the result of this block's split in shared memory.
__device__ __forceinline__ void AttendSplit(const onnx_kv::GqaParams& p, const Place& place, const RowLengths& lengths,
                                            int window_start, const onnx_kv::Splits& splits, Shared& shared,
                                            unsigned char* work) {
  const int split = blockIdx.x, warp = threadIdx.x / 32;
  const int begin = window_start + split * splits.tokens;
  const int end = min(begin + splits.tokens, lengths.total);
  if constexpr (HEAD_DIM % 16 != 0) {
    Zero(work, WARPS * kRingBytes);
    __syncthreads();
  }
  Stream stream(CacheRow(p.present_key, p.present, place.row, place.kv_head),
                CacheRow(p.present_value, p.present, place.row, place.kv_head), p.present.seq, lengths.past,
                SharedAddress(work) + warp * kRingBytes, SharedAddress(shared.barriers[warp]));
  int next = begin + warp * TILE;  // the tile to fetch next
#pragma unroll
  for (int stage = 0; stage < STAGES - 1; ++stage, next += kUnit) stream.Fetch(next, end, stage);
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
    stream.Await(stage);
    stream.Fetch(next, end, free);
    if (token + TILE > lengths.past) stream.Complete(token, stage, shared.fresh);
    AttendTile(p, place, scale, token, lengths.total, stream.Tile(stage), SharedAddress(shared.queries), heads);
    free = stage;
    stage = stage + 1 == STAGES ? 0 : stage + 1;
  }

  __syncthreads();
  float* merge = reinterpret_cast<float*>(work);
  Publish(heads, shared, merge);
  __syncthreads();
  MergeWarps(place, shared, merge);
}

}  // namespace

// grid (splits of the longest row, KV heads x blocks of query heads, batch), in clusters of CLUSTER splits. `workspace` is
// [place][clusters][items][8]; `tickets` is [place][CLUSTER], zero before and after.
extern "C" __global__ void __launch_bounds__(kThreads)
    gqa_decode(const __grid_constant__ onnx_kv::GqaParams p, float* workspace, uint32_t* tickets, int most_splits) {
  extern __shared__ __align__(16) unsigned char work[];
  __shared__ Shared shared;
  WaitForPreviousKernel();
  const Place place(p);
  const RowLengths lengths = ReadLengths(p, place.row);
  const int window_start = p.window > 0 ? max(0, lengths.total - p.window) : 0;
  const onnx_kv::Splits splits = onnx_kv::SplitsOf(lengths.total - window_start, kTokenBytes, kUnit, most_splits);
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
  if (split / CLUSTER * CLUSTER >= splits.count) return;
  if (split < splits.count) AttendSplit(p, place, lengths, window_start, splits, shared, work);
  SyncCluster<CLUSTER>();
  MergeSplits(p, place, shared, splits.count, workspace, tickets);
  SyncCluster<CLUSTER>();  // nobody leaves while its result is read
}
