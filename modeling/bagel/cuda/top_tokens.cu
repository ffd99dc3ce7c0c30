// The largest logits of a few rows and their tokens, sorted, in one launch.
//
// Some blocks share a row; each keeps its chunk of it in registers. They count the numbers of every
// bin, which is 11 of 16 bits; then those in the bin with the last number to be taken by the other
// 5; then put what is taken into a list; and each finds the places of some of the list. Before a
// step that needs what other blocks have found they wait for each other: three times.
//
// The results are those of torch.topk for more than 32 numbers: a stable sort of a list in which
// what lies above the last number taken comes first, then as many as are missing of those with its
// bits, both in the order of the row. +0 is taken before -0, but equal to it in the sort.
//
// Sizes come as macros, see top_tokens.py. Numbers are bf16.

#include "grid.cuh"

#define LEAF_BITS 5
#define LEAVES (1 << LEAF_BITS)  // of a bin: a lane each
#define BINS (1 << (16 - LEAF_BITS))
#define THREAD_BINS ((BINS + THREADS - 1) / THREADS)
#define CHUNK ((VOCAB / 8 + BLOCKS - 1) / BLOCKS)    // eights of a block
#define VECTORS ((CHUNK + THREADS - 1) / THREADS)    // eights of a thread
#define PLACE_BITS 10
#define ALL_LANES 0xffffffffu

static_assert(LEAVES == 32 && WARPS <= 32, "a lane for each");
static_assert(VOCAB % 8 == 0 && COUNT <= VOCAB && COUNT <= 1 << PLACE_BITS, "sizes");
static_assert(CHUNK * 8 < 1 << 16, "two counts of a block in 32 bits");

struct Work {
  const uint4* logits;  // [ROWS, VOCAB / 8]
  u16* values;          // [ROWS, COUNT]
  i64* tokens;          // [ROWS, COUNT]
  u32* counts;          // [ROWS, COUNTS]: of a row's bins, and its counter; zero at the start
  uint2* leaves;        // [ROWS, BLOCKS, LEAVES]: how many numbers lie above a leaf, and in it
  uint2* taken;         // [ROWS, COUNT]: bits and token
};
static_assert(sizeof(Work) == WORK_BYTES && COUNTS > BINS, "as packed by top_tokens.py");

struct Shared {
  u32 bins[BINS];
  u32 leaves[LEAVES], above_bin;    // of this block
  u32 all_above[LEAVES], all_in[LEAVES], front_above[LEAVES], front_in[LEAVES];
  u32 bin, last, above_at, last_at;
  u32 warp_sums[WARPS];
  u32 sorted[COUNT];
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "shared memory");

// How far below the largest number it stands: 16 bits, 0 for all that are NaN.
__device__ __forceinline__ u32 depth_of(u32 bits) {
  if ((bits & 0x7fff) > 0x7f80) return 0;
  return bits & 0x8000 ? bits : bits ^ 0x7fff;
}

// A thread's numbers, one behind the other in the row.
struct Numbers {
  uint4 eights[VECTORS];
  int size;

  __device__ __forceinline__ void load(const uint4* row, int first, int end) {
    size = 0;
#pragma unroll
    for (int i = 0; i < VECTORS; i++)
      if (first + i < end) eights[i] = __ldg(row + first + i), size += 8;
  }
  // Hands on the bits of all, and how many numbers are in front.
  template <typename Act>
  __device__ __forceinline__ void each(Act act) const {
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
      if (i * 8 >= size) return;
      const u32 twos[4] = {eights[i].x, eights[i].y, eights[i].z, eights[i].w};
#pragma unroll
      for (int j = 0; j < 8; j++) act(twos[j / 2] >> j % 2 * 16 & 0xffff, i * 8 + j);
    }
  }
};

// The sum of what the lanes in front and this one have.
__device__ __forceinline__ u32 sum_up_to(u32 x) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const u32 other = __shfl_up_sync(ALL_LANES, x, step);
    if (lane >= step) x += other;
  }
  return x;
}

__device__ __forceinline__ u32 sum_of_lanes(u32 x) {
#pragma unroll
  for (int half = 16; half >= 1; half /= 2) x += __shfl_xor_sync(ALL_LANES, x, half);
  return x;
}

// The sum of what the threads of the block in front of this one have.
__device__ __forceinline__ u32 sum_in_front(Shared& shared, u32 x) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const u32 up_to = sum_up_to(x);
  if (lane == 31) shared.warp_sums[warp] = up_to;
  __syncthreads();
  return sum_of_lanes(lane < warp ? shared.warp_sums[lane] : 0) + up_to - x;
}

// Adds the block's numbers to the bins of the row.
__device__ __forceinline__ void count_bins(Shared& shared, const Numbers& mine, u32* row_bins) {
  mine.each([&](u32 bits, int) { atomicAdd(&shared.bins[depth_of(bits) >> LEAF_BITS], 1u); });
  __syncthreads();
  for (int i = threadIdx.x; i < BINS; i += THREADS)
    if (shared.bins[i] > 0) atomicAdd(row_bins + i, shared.bins[i]);
}

// Finds the bin of the last number to be taken.
__device__ __forceinline__ void find_bin(Shared& shared, const u32* row_bins) {
  const int first = threadIdx.x * THREAD_BINS;
  u32 counts[THREAD_BINS], sum = 0;
#pragma unroll
  for (int i = 0; i < THREAD_BINS; i++) {
    counts[i] = first + i < BINS ? __ldcg(row_bins + first + i) : 0;
    sum += counts[i];
  }
  u32 above = sum_in_front(shared, sum);
#pragma unroll
  for (int i = 0; i < THREAD_BINS; i++) {
    if (above < COUNT && COUNT <= above + counts[i]) shared.bin = first + i;
    above += counts[i];
  }
}

// Counts the block's numbers above that bin, and in each of its leaves.
__device__ __forceinline__ void count_leaves(Shared& shared, const Numbers& mine, uint2* leaves) {
  const u32 bin = shared.bin;
  u32 num_above = 0;
  mine.each([&](u32 bits, int) {
    const u32 depth = depth_of(bits);
    num_above += depth >> LEAF_BITS < bin;
    if (depth >> LEAF_BITS == bin) atomicAdd(&shared.leaves[depth % LEAVES], 1u);
  });
  if (num_above > 0) atomicAdd(&shared.above_bin, num_above);
  __syncthreads();
  if (threadIdx.x < LEAVES) {
    const u32 in = shared.leaves[threadIdx.x];
    const u32 above = shared.above_bin + sum_up_to(in) - in;
    __stcg(leaves + blockIdx.x * LEAVES + threadIdx.x, make_uint2(above, in));
  }
}

// Finds the depth of the last number to be taken, and where in the list the block's numbers go.
__device__ __forceinline__ void find_leaf(Shared& shared, const uint2* leaves) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int block = blockIdx.x % BLOCKS;
  uint2 all = make_uint2(0, 0), front = make_uint2(0, 0);
  for (int i = warp; i < BLOCKS; i += WARPS) {
    const uint2 found = __ldcg(leaves + (blockIdx.x - block + i) * LEAVES + lane);
    all.x += found.x, all.y += found.y;
    if (i < block) front.x += found.x, front.y += found.y;
  }
  atomicAdd(&shared.all_above[lane], all.x);
  atomicAdd(&shared.all_in[lane], all.y);
  atomicAdd(&shared.front_above[lane], front.x);
  atomicAdd(&shared.front_in[lane], front.y);
  __syncthreads();
  if (warp > 0) return;
  const u32 above = shared.all_above[lane];
  if (above < COUNT && COUNT <= above + shared.all_in[lane]) {
    shared.last = shared.bin << LEAF_BITS | lane;
    shared.above_at = shared.front_above[lane];
    shared.last_at = above + shared.front_in[lane];
  }
}

// Puts what is taken of the block's numbers into the list, in their order.
__device__ __forceinline__ void take(Shared& shared, const Numbers& mine, int first, uint2* taken) {
  const u32 last = shared.last;
  u32 counts = 0;
  mine.each([&](u32 bits, int) {
    const u32 depth = depth_of(bits);
    counts += depth < last ? 1 << 16 : depth == last;
  });
  const u32 front = sum_in_front(shared, counts);
  u32 above_at = shared.above_at + (front >> 16), last_at = shared.last_at + (front & 0xffff);
  mine.each([&](u32 bits, int i) {
    const u32 depth = depth_of(bits);
    const uint2 one = make_uint2(bits, first * 8 + i);
    if (depth < last) __stcg(taken + above_at++, one);
    if (depth == last) {
      if (last_at < COUNT) __stcg(taken + last_at, one);
      last_at++;
    }
  });
}

// Writes some of the list to their places in the results: a warp counts what comes before a number.
__device__ __forceinline__ void sort(Shared& shared, const uint2* taken, u16* values, i64* tokens) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  for (int i = threadIdx.x; i < COUNT; i += THREADS) {
    const u32 depth = depth_of(__ldcg(taken + i).x);
    shared.sorted[i] = (depth == 0x8000 ? 0x7fff : depth) << PLACE_BITS | i;  // -0 as +0
  }
  __syncthreads();
  for (int i = blockIdx.x % BLOCKS * WARPS + warp; i < COUNT; i += BLOCKS * WARPS) {
    const uint2 one = __ldcg(taken + i);
    const u32 mine = shared.sorted[i];
    u32 place = 0;
    for (int j = lane; j < COUNT; j += 32) place += shared.sorted[j] < mine;
    place = sum_of_lanes(place);
    if (lane == 0) {
      values[place] = one.x;
      tokens[place] = one.y;
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    top_tokens(const __grid_constant__ Work work) {
  Shared& shared = *(Shared*)block_memory();
  const int row = blockIdx.x / BLOCKS, block = blockIdx.x % BLOCKS;
  u32* row_bins = work.counts + row * COUNTS;
  u32* counter = row_bins + BINS;
  uint2* taken = work.taken + row * COUNT;

  const int first = block * CHUNK + threadIdx.x * VECTORS;
  Numbers mine;
  mine.load(work.logits + row * (VOCAB / 8), first, min((block + 1) * CHUNK, VOCAB / 8));
  for (int i = threadIdx.x; i < BINS; i += THREADS) shared.bins[i] = 0;
  if (threadIdx.x < LEAVES) {
    const int leaf = threadIdx.x;
    shared.leaves[leaf] = shared.all_above[leaf] = shared.all_in[leaf] = 0;
    shared.front_above[leaf] = shared.front_in[leaf] = shared.above_bin = 0;
  }
  __syncthreads();

  count_bins(shared, mine, row_bins);
  __syncthreads();
  wait_for_all(counter, BLOCKS);
  find_bin(shared, row_bins);
  __syncthreads();
  count_leaves(shared, mine, work.leaves);
  __syncthreads();
  wait_for_all(counter, 2 * BLOCKS);
  find_leaf(shared, work.leaves);
  __syncthreads();
  take(shared, mine, first, taken);
  __syncthreads();
  wait_for_all(counter, 3 * BLOCKS);
  sort(shared, taken, work.values + row * COUNT, work.tokens + row * COUNT);
}
