// Decode: one new token a row. Rotate, append and attend in one kernel.
//
// A block serves one row, one KV head (all query heads of its group: K and V are read once) and one split of the row's
// tokens. Its warps take tiles of kTile tokens in turn and merge at the end; splits merge through `workspace`: whichever
// block takes a row's last ticket merges all of them, in their order. The new token never comes from the cache.
//
// Specialised by DTYPE, HEAD_DIM, HEAD_TILES (blocks of 8 query heads), WARPS, BLOCKS (to fit on a multiprocessor).

#include "onnx_kv/ops/gqa/cuda/decode_stream.cuh"
#include "onnx_kv/ops/gqa/cuda/rotary.cuh"

constexpr int kHeads = 8 * HEAD_TILES;  // query heads of a block, padding included
constexpr int kThreads = 32 * WARPS;
constexpr int kUnit = WARPS * kTile;

static_assert(HEAD_DIM % 8 == 0 && HEAD_DIM >= 32 && HEAD_DIM <= 256);

// A block's row, KV head, and the query heads it serves. A group of more than kHeads takes several blocks.
struct Place {
  int row;
  int kv_head;
  int first_head;
  int heads;
  bool appends;

  __device__ __forceinline__ explicit Place(int group) : row(blockIdx.z), kv_head(blockIdx.y), heads(group), appends(true) {
    int skipped = 0;
    if (group > kHeads) {
      const int blocks = (group + kHeads - 1) / kHeads;
      kv_head = static_cast<unsigned>(kv_head) / blocks;
      skipped = (blockIdx.y - kv_head * blocks) * kHeads;
      heads = min(kHeads, group - skipped);
      appends = skipped == 0;
    }
    first_head = kv_head * group + skipped;
  }

  __device__ __forceinline__ int Index() const { return blockIdx.z * gridDim.y + blockIdx.y; }
};

#include "onnx_kv/ops/gqa/cuda/decode_merge.cuh"

namespace {

struct Shared {
  alignas(16) unsigned char queries[kHeads * kQueryPitch];
  alignas(16) unsigned char fresh[2][HEAD_DIM * sizeof(Element)];  // the new token's K and V
  WarpResults results;
  float norm[kHeads + 1];  // factors of the RMS norms
  bool last;
};

// The new token's heads, the queries and then K, in pairs of elements: a thread has the same pair of every kTeams-th head.
class NewToken {
 public:
  // Loads them: only the rotation waits for the row's length.
  __device__ __forceinline__ NewToken(const onnx_kv::GqaParams& p, const Place& place)
      : pair_(p, threadIdx.x % kHeadPairs), team_(threadIdx.x / kHeadPairs) {
    queries_ = static_cast<const Element*>(p.query) + place.row * p.query_token_stride +
               static_cast<int64_t>(place.first_head) * HEAD_DIM;
    key_ = static_cast<const Element*>(p.key) + place.row * p.kv_token_stride + place.kv_head * HEAD_DIM;
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
      const int head = Head(i);
      if (team_ < kTeams && head <= place.heads) raw_[i] = pair_.Load(Source(head, place));
    }
  }

  // Normalises and rotates: the queries into shared memory, and in the split that `ends` the row also the new K, and copies
  // the new V, these into the cache as well.
  __device__ __forceinline__ void Store(const onnx_kv::GqaParams& p, const Place& place, int past, bool ends, Shared& shared) {
    if (p.q_norm_weight != nullptr || p.k_norm_weight != nullptr) FindNorms(p, place, shared);
    pair_.Turn(p, RotaryPosition(p, place.row, 0, past));
    const int64_t token = past * p.present.seq;
    if (ends && threadIdx.x >= kThreads - 32) StoreValue(p, place, token, shared);
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
      const int head = Head(i);
      const bool is_key = head == place.heads;
      if (team_ >= kTeams || head >= place.heads + ends) continue;
      const void* weight = is_key ? p.k_norm_weight : p.q_norm_weight;
      if (weight != nullptr) pair_.Scale(raw_[i], shared.norm[head], static_cast<const Element*>(weight));
      const float2 rotated = pair_.Rotate(raw_[i]);
      pair_.Store(reinterpret_cast<Element*>(is_key ? shared.fresh[0] : shared.queries + head * kQueryPitch), rotated);
      if (is_key && place.appends) {
        pair_.Store(CacheRow(p.present_key, p.present, place.row, place.kv_head) + token, rotated);
      }
    }
  }

 private:
  static constexpr int kTeams = kThreads / kHeadPairs;
  static_assert(kTeams > 0);
  static constexpr int kRounds = (kHeads + kTeams) / kTeams;  // kHeads queries and a key

  __device__ __forceinline__ int Head(int round) const { return team_ + round * kTeams; }
  __device__ __forceinline__ const Element* Source(int head, const Place& place) const {
    return head < place.heads ? queries_ + head * HEAD_DIM : key_;
  }

  __device__ __forceinline__ void FindNorms(const onnx_kv::GqaParams& p, const Place& place, Shared& shared) const {
    for (int head = threadIdx.x / 32; head <= place.heads; head += WARPS) {
      const float factor = NormFactor(Source(head, place), head < place.heads ? p.q_norm_epsilon : p.k_norm_epsilon);
      if (threadIdx.x % 32 == 0) shared.norm[head] = factor;
    }
    __syncthreads();
  }

  __device__ __forceinline__ void StoreValue(const onnx_kv::GqaParams& p, const Place& place, int64_t token,
                                             Shared& shared) const {
    const uint4* value = reinterpret_cast<const uint4*>(static_cast<const Element*>(p.value) + place.row * p.kv_token_stride +
                                                        place.kv_head * HEAD_DIM);
    uint4* row = reinterpret_cast<uint4*>(CacheRow(p.present_value, p.present, place.row, place.kv_head) + token);
    for (int chunk = threadIdx.x % 32; chunk < kRowChunks; chunk += 32) {
      reinterpret_cast<uint4*>(shared.fresh[1])[chunk] = value[chunk];
      if (place.appends) row[chunk] = value[chunk];
    }
  }

  RotaryPair pair_;
  int team_;
  const Element* queries_;
  const Element* key_;
  float2 raw_[kRounds];
};

// Softmax state of up to 8 heads; element e of `output` belongs to head column 2c + e % 2.
struct HeadState {
  float output[kOutputTiles][4] = {};
  float maximum[2] = {MinusInfinity(), MinusInfinity()};
  float sum[2] = {};  // of the tokens that this lane saw

  // Takes in kTile scores a head (log2 units): they become weights, and what was summed so far is rescaled.
  __device__ __forceinline__ void Weigh(float (&scores)[4]) {
    float factor[2];
#pragma unroll
    for (int column = 0; column < 2; ++column) {
      float& upper = scores[column];
      float& lower = scores[column + 2];
      const float highest = MaxOverLanes(fmaxf(maximum[column], fmaxf(upper, lower)), 4);
      const float base = FiniteBase(highest);
      factor[column] = Exp2(maximum[column] - base);
      maximum[column] = highest;
      upper = Exp2(upper - base);
      lower = Exp2(lower - base);
      sum[column] = sum[column] * factor[column] + upper + lower;
    }
    if (!__any_sync(kFullWarp, factor[0] != 1.0f || factor[1] != 1.0f)) return;
#pragma unroll
    for (int tile = 0; tile < kOutputTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) output[tile][i] *= factor[i % 2];
    }
  }

  // Leaves the state of head columns 0 to 7 as heads `first` to `first + 7` of a warp's results.
  __device__ __forceinline__ void Publish(int first, float2* stats, float* outputs) const {
    const int r = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
#pragma unroll
    for (int column = 0; column < 2; ++column) {
      const int head = first + 2 * c + column;
      const float total = SumOverLanes(sum[column], 4);
      if (r == 0) stats[head] = {maximum[column], total};
#pragma unroll
      for (int tile = 0; tile < kOutputTiles; ++tile) {
        const int element = OutputElement(tile, 0, r);
        if (HEAD_DIM % (8 * kChunkElements) != 0 && element >= HEAD_DIM) continue;
        *reinterpret_cast<float2*>(outputs + MergeOffset(head, element)) =
            float2{output[tile][column], output[tile][column + 2]};
      }
    }
  }
};

// Scales, biases and masks a tile's scores against 8 heads from `first` on.
__device__ __forceinline__ void Adjust(const onnx_kv::GqaParams& p, const Place& place, const ScoreScale& scale, int first,
                                       int token, int total, float (&scores)[4]) {
  const int column = token + threadIdx.x % 32 / 4, head = first + threadIdx.x % 4 * 2;
  if (scale.softcap > 0) {
#pragma unroll
    for (int i = 0; i < 4; ++i) scores[i] = scale(scores[i]);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) scores[i] *= scale.factor;
  }
  if (p.attention_bias != nullptr) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (column + i / 2 * 8 >= total || head + i % 2 >= place.heads) continue;
      const Element* bias = BiasRow(p, place.row, place.first_head + head + i % 2, 0);
      scores[i] = AddBias(scores[i], bias[column + i / 2 * 8]);
    }
  }
  if (token + kTile <= total) return;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (column + i / 2 * 8 >= total) scores[i] = MinusInfinity();
  }
}

// A warp's tiles, from `token` to before `end`, against all heads of the block.
__device__ __forceinline__ void AttendTiles(const onnx_kv::GqaParams& p, const Place& place, const Shared& shared, Stream& stream,
                                            int token, int end, int total, HeadState (&heads)[HEAD_TILES]) {
  const ScoreScale scale(p);
  const unsigned char* query = shared.queries + threadIdx.x % 32 / 4 * kQueryPitch + threadIdx.x % 4 * 16;
#pragma unroll 1
  for (; token < end; token += kUnit) {
    const bool more = token + kUnit < end, last = token + kTile >= total;
    float scores[HEAD_TILES][4] = {};
    float odd[HEAD_TILES][4] = {};
#pragma unroll
    for (int panel = 0; panel < kKeyPanels; ++panel) {
      if (last) stream.CompleteKeys(panel, shared.fresh[0]);
#pragma unroll
      for (int i = 0; i < kKeyPanel; ++i) {
        const int block = panel * kKeyPanel + i;
        if (block >= kKeyBlocks) continue;
#pragma unroll
        for (int tile = 0; tile < HEAD_TILES; ++tile) {
          const uint4 q = *reinterpret_cast<const uint4*>(query + tile * 8 * kQueryPitch + block * 64);
          AddScores(block % 2 == 0 ? scores[tile] : odd[tile], stream.key[i][0], stream.key[i][1], q);
        }
      }
      if (panel + 1 < kKeyPanels) {
        stream.LoadKeys(panel + 1);
      } else if (more) {
        stream.NextKeys();
        stream.LoadKeys(0);
      }
    }
#pragma unroll
    for (int tile = 0; tile < HEAD_TILES; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[tile][i] += odd[tile][i];
      Adjust(p, place, scale, tile * 8, token, total, scores[tile]);
      heads[tile].Weigh(scores[tile]);
    }
#pragma unroll
    for (int panel = 0; panel < kValuePanels; ++panel) {
      if (last) stream.CompleteValues(panel, shared.fresh[1]);
#pragma unroll
      for (int tile = 0; tile < HEAD_TILES; ++tile) {
        const Weights weights(scores[tile]);
#pragma unroll
        for (int i = 0; i < kValuePanel; ++i) {
          const int block = panel * kValuePanel + i;
          if (block < kValueBlocks) AddValues(heads[tile].output + block * kBlockTiles, stream.value[i], weights);
        }
      }
      if (panel + 1 < kValuePanels) {
        stream.LoadValues(panel + 1);
      } else if (more) {
        stream.NextValues();
        stream.LoadValues(0);
      }
    }
  }
}

}  // namespace

// grid (splits of the longest row, KV heads x blocks of query heads, batch). `workspace` is [place][splits][SplitFloats];
// `tickets` is [place], zero before and after. `group` is the query heads a KV head.
extern "C" __global__ void __launch_bounds__(kThreads, BLOCKS)
    gqa_decode(const __grid_constant__ onnx_kv::GqaParams p, float* workspace, uint32_t* tickets, int group,
               onnx_kv::SplitRule rule) {
  __shared__ Shared shared;
  extern __shared__ __align__(16) float merge[];  // [WARPS][kHeads][kMergePitch], by MergeOffset
  WaitForPreviousKernel();
  const RowLengths lengths = ReadLengths(p, blockIdx.z);
  const Place place(group);
  NewToken fresh(p, place);
  const int window_start = p.window > 0 ? max(0, lengths.total - p.window) : 0;
  const onnx_kv::Splits splits = rule.Of(lengths.total - window_start, kUnit);
  const int split = blockIdx.x;
  if (lengths.fresh == 0) {
    for (int item = threadIdx.x; item < place.heads * kItemsPerHead && split == 0; item += kThreads) {
      Finish(p, place, item, Merging());
    }
    return;
  }
  if (split >= splits.count) return;

  const int warp = threadIdx.x / 32;
  const int begin = window_start + split * splits.tokens, end = min(begin + splits.tokens, lengths.total);
  const int token = begin + warp * kTile;
  Stream stream(CacheRow(p.present_key, p.present, place.row, place.kv_head),
                CacheRow(p.present_value, p.present, place.row, place.kv_head), p.present.seq, lengths.past, token, kUnit);
  if (token < end) {
    stream.LoadKeys(0);
    stream.LoadValues(0);
  }
  fresh.Store(p, place, lengths.past, split == splits.count - 1, shared);
  __syncthreads();
  HeadState heads[HEAD_TILES];
  AttendTiles(p, place, shared, stream, token, end, lengths.total, heads);
#pragma unroll
  for (int tile = 0; tile < HEAD_TILES; ++tile) {
    heads[tile].Publish(tile * 8, shared.results.stats[warp], merge + warp * kHeads * kMergePitch);
  }
  __syncthreads();
  const Exchange exchange(workspace, place.Index());
  for (int item = threadIdx.x; item < place.heads * kItemsPerHead; item += kThreads) {
    const Merging merging = shared.results.Merge(merge, item);
    if (splits.count == 1) {
      Finish(p, place, item, merging);
    } else {
      exchange.Store(split, item, merging);
    }
  }
  if (splits.count == 1) return;
  __syncthreads();
  if (threadIdx.x == 0) {
    shared.last = TakeTicket(tickets + place.Index(), splits.count - 1) == static_cast<uint32_t>(splits.count - 1);
  }
  __syncthreads();
  if (shared.last) MergeSplits(p, place, exchange, splits.count, reinterpret_cast<Merging*>(merge));
}
