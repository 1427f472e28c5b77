// Prefill on sm_90: what prefill.cu does, with a warpgroup that fetches and two that compute by wgmma.
//
// A block serves 128 rows of queries (see prefill.cu), 64 a warpgroup. The producers copy tiles of K and of V, each with a
// barrier of its own, as far ahead as there are stages. A consumer starts the next tile's scores before it waits for this
// tile's values, so that its softmax runs beside a product (Shah et al., FlashAttention-3, 2024).
//
// Specialised by DTYPE (16-bit types), HEAD_DIM (64 or 128), COLUMNS (128), STAGES.

constexpr int kWarpRows = 16;
constexpr int kRows = 128;

#include "onnx_kv/ops/cuda/wgmma.cuh"
#include "onnx_kv/ops/gqa/cuda/prefill_rows.cuh"

namespace {

constexpr int kConsumers = 2 * kRows;
constexpr int kProducers = 128;
constexpr int kThreads = kConsumers + kProducers;
constexpr int kPanels = HEAD_DIM / kPanelElements;
constexpr int kQueryPanel = kRows * kPanelRowBytes;
constexpr int kTilePanel = COLUMNS * kPanelRowBytes;
constexpr int kTileBytes = kPanels * kTilePanel;  // of K or V
constexpr int kSlots = 2 * STAGES;                // K of stage 0, V of stage 0, K of stage 1, …
static_assert(kRows * kRowPitch <= 2 * kTileBytes, "queries are prepared in the last stage's room");

// Tiles in turn: 2n is the n-th tile of K, 2n + 1 the n-th of V. A slot is filled and emptied once a round.
__device__ __forceinline__ int Slot(int copy) { return copy % kSlots; }
__device__ __forceinline__ int Round(int copy) { return copy / kSlots & 1; }

struct Barriers {
  uint64_t full[kSlots];
  uint64_t empty[kSlots];

  __device__ __forceinline__ void Init() {
    for (int slot = 0; slot < kSlots; ++slot) {
      InitBarrier(SharedAddress(&full[slot]), kProducers);
      InitBarrier(SharedAddress(&empty[slot]), kConsumers / 32);
    }
    FenceBarrierInit();
  }
  __device__ __forceinline__ void AwaitFull(int copy) { AwaitBarrier(SharedAddress(&full[Slot(copy)]), Round(copy)); }
  __device__ __forceinline__ void AwaitEmpty(int copy) {
    AwaitBarrier(SharedAddress(&empty[Slot(copy)]), Round(copy) ^ 1);
  }
  __device__ __forceinline__ void SetFull(int copy) { Arrive(SharedAddress(&full[Slot(copy)])); }
  __device__ __forceinline__ void SetFullAfterCopies(int copy) { ArriveAfterCopies(SharedAddress(&full[Slot(copy)])); }
  __device__ __forceinline__ void SetEmpty(int copy) {
    if (threadIdx.x % 32 == 0) Arrive(SharedAddress(&empty[Slot(copy)]));
  }
};

// Starts this thread's copies of the tile that begins at `token`; rows from `end` on become zeros.
__device__ __forceinline__ void FetchTile(const Element* cache, int64_t stride, int token, int end, uint32_t target) {
  const int thread = threadIdx.x - kConsumers;
  const int chunk = thread % kRowChunks, first = thread / kRowChunks;
  constexpr int kStep = kProducers / kRowChunks;  // a multiple of 8: the swizzle of a thread's rows is one
  const uint32_t place = target + chunk / 8 * kTilePanel + Swizzled(first, chunk % 8);
  const Element* source = cache + (token + first) * stride + chunk * kChunkElements;
#pragma unroll
  for (int row = 0; row < COLUMNS; row += kStep) {
    if (token + first + row < end) {
      CopyAsync(place + row * kPanelRowBytes, source + row * stride);
    } else {
      StoreShared(place + row * kPanelRowBytes, uint4{});
    }
  }
}

// Moves the prepared queries from their rows to the panels that products read.
__device__ __forceinline__ void ArrangeQueries(const unsigned char* rows, uint32_t panels) {
  for (int i = threadIdx.x; i < kRows * kRowChunks; i += kConsumers) {
    const int row = i / kRowChunks, chunk = i % kRowChunks;
    StoreShared(panels + chunk / 8 * kQueryPanel + Swizzled(row, chunk % 8),
                *reinterpret_cast<const uint4*>(rows + row * kRowPitch + chunk * 16));
  }
}

// scores[64 x COLUMNS] = queries · keysᵀ
__device__ __forceinline__ void StartScores(ScoreBlocks& scores, uint32_t queries, uint32_t keys) {
  BeginProducts();
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const int panel = step / 4, within = step % 4 * 32;
    ProductAdd(scores, Operand(queries + panel * kQueryPanel + within, 0),
               Operand(keys + panel * kTilePanel + within, 0), step > 0);
  }
  CommitProducts();
}

using Weights = uint32_t[COLUMNS / 16][4];

__device__ __forceinline__ void PackWeights(const ScoreBlocks& scores, Weights& weights) {
#pragma unroll
  for (int step = 0; step < COLUMNS / 16; ++step) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* pair = &scores[2 * step + i / 2][i % 2 * 2];
      weights[step][i] = Pack(pair[0], pair[1]);
    }
  }
}

// output[64 x HEAD_DIM] += weights · values
__device__ __forceinline__ void StartOutput(OutputBlocks& output, const Weights& weights, uint32_t values) {
  BeginProducts();
#pragma unroll
  for (int step = 0; step < COLUMNS / 16; ++step) {
    ProductAdd(output, weights[step], Operand(values + step * 16 * kPanelRowBytes, kTilePanel));
  }
  CommitProducts();
}

__device__ __forceinline__ void Produce(const onnx_kv::GqaParams& p, const Place& place, int begin, int end,
                                        uint32_t stages, Barriers& barriers) {
  const Element* keys = CacheRow(p.present_key, p.present, place.row, place.kv_head);
  const Element* values = CacheRow(p.present_value, p.present, place.row, place.kv_head);
  const int copies = (end - begin + COLUMNS - 1) / COLUMNS * 2;
  for (int copy = 0; copy < copies; ++copy) {
    if (copy == kSlots - 2) SyncThreads<kThreads>(1);  // the queries have left the last stage
    barriers.AwaitEmpty(copy);
    const int token = begin + copy / 2 * COLUMNS;
    FetchTile(copy % 2 == 0 ? keys : values, p.present.seq, token, end, stages + Slot(copy) * kTileBytes);
    if (token + COLUMNS <= end) {
      barriers.SetFullAfterCopies(copy);
    } else {  // zeros were stored too, which the arrival after copies would not wait for
      CommitCopies();
      WaitCopies<0>();
      barriers.SetFull(copy);
    }
  }
  if (copies <= kSlots - 2) SyncThreads<kThreads>(1);
}

__device__ __forceinline__ void Consume(const onnx_kv::GqaParams& p, const Place& place, int begin, int end,
                                        uint32_t queries, uint32_t stages, Barriers& barriers) {
  const int first = threadIdx.x / 32 * kWarpRows;
  const uint32_t own = queries + threadIdx.x / 128 * 64 * kPanelRowBytes;
  const ScoreRule rule(p);
  const RowBounds bounds(p, place, first);
  ScoreBlocks scores;
  OutputBlocks output = {};
  Weights weights;
  RowState state;
  float factors[2];
  const int tiles = (end - begin + COLUMNS - 1) / COLUMNS;
  if (tiles > 0) {
    barriers.AwaitFull(0);
    FenceForProducts();  // copies and stores were ordinary ones
    StartScores(scores, own, stages);
    WaitProducts<0>();
    Pin(scores);
    barriers.SetEmpty(0);
    Adjust(p, place, rule, bounds, first, begin, scores);
    state.Weigh(scores, rule.unit, factors);
    PackWeights(scores, weights);
    for (int tile = 1; tile < tiles; ++tile) {
      barriers.AwaitFull(2 * tile - 1);
      barriers.AwaitFull(2 * tile);
      FenceForProducts();  // once, and before any product: it would wait for those under way
      StartScores(scores, own, stages + Slot(2 * tile) * kTileBytes);
      StartOutput(output, weights, stages + Slot(2 * tile - 1) * kTileBytes);
      WaitProducts<1>();
      Pin(scores);
      barriers.SetEmpty(2 * tile);
      Adjust(p, place, rule, bounds, first, begin + tile * COLUMNS, scores);
      state.Weigh(scores, rule.unit, factors);
      WaitProducts<0>();
      Pin(output);
      barriers.SetEmpty(2 * tile - 1);
      Rescale(output, factors);
      PackWeights(scores, weights);
    }
    barriers.AwaitFull(2 * tiles - 1);
    FenceForProducts();
    StartOutput(output, weights, stages + Slot(2 * tiles - 1) * kTileBytes);
    WaitProducts<0>();
    Pin(output);
  }
  StoreRows(p, place, first, state, output);
}

}  // namespace

// grid (KV heads, q_len * group / 128, batch)
extern "C" __global__ void __launch_bounds__(kThreads, 1) gqa_prefill(const __grid_constant__ onnx_kv::GqaParams p) {
  extern __shared__ unsigned char unaligned[];
  __shared__ Barriers barriers;
  const uint32_t queries = (SharedAddress(unaligned) + 1023) & ~1023u;
  const uint32_t stages = queries + kPanels * kQueryPanel;
  WaitForPreviousKernel();
  const Place place(p);
  const bool any = place.Token(0) < place.lengths.fresh;
  const int end = any ? place.End(kRows - 1) : 0;
  const int begin = any ? place.Begin(p, 0) : 0;
  if (threadIdx.x == 0) barriers.Init();
  __syncthreads();
  if (threadIdx.x >= kConsumers) {
    ReleaseRegisters<40>();
    Produce(p, place, begin, end, stages, barriers);
  } else {
    ClaimRegisters<232>();
    unsigned char* rows = unaligned + (stages - SharedAddress(unaligned)) + (kSlots - 2) * kTileBytes;
    PrepareQueries(p, place, rows);
    SyncThreads<kConsumers>(2);
    ArrangeQueries(rows, queries);
    FenceForProducts();
    SyncThreads<kThreads>(1);
    Consume(p, place, begin, end, queries, stages, barriers);
  }
}
