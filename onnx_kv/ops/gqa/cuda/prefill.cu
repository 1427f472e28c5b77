// Prefill: several new tokens a row, on whatever is in the cache already. gqa_append has written them.
//
// A block serves one row, one KV head and ROWS of its queries, where a row of queries is (new token, query head of the
// group), token first: all heads of the group share each read of K and V. Flash attention (Dao, 2023): tiles of COLUMNS
// cached tokens pass through two stages of shared memory; softmax is kept online. Tokens that no query of the block sees are
// never addressed.
//
// Specialised by DTYPE, HEAD_DIM, WARPS, ROW_BLOCKS (blocks of 16 rows a warp), COLUMNS.

constexpr int kWarpRows = 16 * ROW_BLOCKS;
constexpr int kRows = kWarpRows * WARPS;

#include "onnx_kv/ops/gqa/cuda/prefill_rows.cuh"

namespace {

constexpr int kThreads = 32 * WARPS;
constexpr int kQueryBytes = kRows * kRowPitch;
constexpr int kSideBytes = COLUMNS * kRowPitch;
constexpr int kStageBytes = 2 * kSideBytes;

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

  const ScoreRule rule(p);
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
#pragma unroll
    for (int block = 0; block < ROW_BLOCKS; ++block) {
      Adjust(p, place, rule, RowBounds(p, place, first + block * 16), first + block * 16, token, scores[block]);
      float factors[2];
      states[block].Weigh(scores[block], rule.unit, factors);
      Rescale(output[block], factors);
    }
    WaitCopies<2>();
    __syncthreads();
    Accumulate(output, scores, tile + kSideBytes, lane);
  }
#pragma unroll
  for (int block = 0; block < ROW_BLOCKS; ++block) StoreRows(p, place, first + block * 16, states[block], output[block]);
}
