// All decoder layers over one text token of each of a few sequences, in one launch.
//
// One block a multiprocessor, all at work until the end. A layer is five phases with a barrier over
// the grid between them: q, k and v; attention; its own projection; gate and up; down. Weights do
// not wait for the barriers: every warp has a ring of slots in shared memory and keeps asking for
// the weights it will multiply next, also those of phases to come.
//
// Every value has the bits of the kernels one by one (fused_ops.py, few_rows.py and
// fused_attention.py): the same order of sums, the same points of rounding, the same instructions
// where these round differently. Without fused multiply-adds but where said. Nothing is spilled:
// every look at a barrier throws out the first-level cache. So what depends on the thread is
// computed anew in every phase (`thread_now`) where it would hold a register through all of them.
//
// Sizes come as macros, see text_layers.py. Numbers are bf16 where they are u16.

#include "attention.cuh"
#include "rows.cuh"
#include "weights.cuh"

// A lane's place in a product's result: a row, and two outputs of a tile.
struct Place {
  int row, outputs;
};

// How many slots stay free in front of a phase: what it reads first would stand behind the weights
// that are under way. By trying.
__device__ __forceinline__ int left_free(int phase) {
  return phase == MLP_OUT ? 0 : phase == PROJECT || phase == ATTENDED ? 2 : 3;
}

// What a layer's norms multiply with, which does not depend on other blocks.
__device__ __forceinline__ void load_norms(Shared& shared, const Layer& layer, int phase, int warp,
                                           int lane) {
  const uint4* from = (const uint4*)(phase == PROJECT ? layer.norm : layer.mlp_norm);
#pragma unroll 1
  for (int i = threadIdx.x; i < HIDDEN / 8; i += THREADS) shared.norm[i] = __ldg(from + i);
  if (phase == PROJECT && warp < 2)
    shared.head_norms[warp][lane] =
        __ldg((const uint2*)(warp == 0 ? layer.q_norm : layer.k_norm) + lane);
}

// Brings a row of a product into shared memory: all numbers, or one or two splits.
__device__ __forceinline__ void bring_row(const Work& work, const Shared& shared, int phase,
                                          int row, int thread, uint4* to) {
  const bool is_down = phase == MLP_OUT;
  const int first = is_down ? shared.down_splits[0] : 0, last = is_down ? shared.down_splits[1] : 0;
  const u16* from = is_down ? work.inner + row * INNER
                            : (phase == ATTENDED ? work.attended : work.x) + row * HIDDEN;
#pragma unroll 1
  for (int split = first; split <= last; split++) {
    const int limit = is_down ? min(DOWN_SPLIT, INNER - split * DOWN_SPLIT) / 8 : HIDDEN / 8;
    const uint4* chunks = (const uint4*)(from + split * DOWN_SPLIT);
    uint4 loaded[MOST_CHUNKS];
#pragma unroll
    for (int i = 0; i < MOST_CHUNKS; i++) {
      const int at = thread + i * ROW_THREADS;
      loaded[i] = at < limit ? __ldcg(chunks + at) : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int i = 0; i < MOST_CHUNKS; i++)
      if (thread + i * ROW_THREADS < limit) to[thread + i * ROW_THREADS] = loaded[i];
    to += ROWS * (DOWN_SPLIT / 8 + 1);
  }
}

// Stores q, k or v.
__device__ __forceinline__ void end_heads(const Work& work, const Unit& unit, Place place, float lo,
                                          float hi, u32 bias) {
  const int row = place.row;
  u16* to = work.heads + (unit.matrix == Q   ? row * Q_SIZE
                          : unit.matrix == K ? ROWS * Q_SIZE + row * KV_SIZE
                                             : ROWS * (Q_SIZE + KV_SIZE) + row * KV_SIZE);
  if (row < ROWS)
    *(u32*)(to + unit.row + place.outputs) =
        narrow(__fadd_rn(lo, low(bias)), __fadd_rn(hi, high(bias)));
}

// Adds a product, rounded first, to two numbers of the residual stream.
__device__ __forceinline__ void end_sum(const Work& work, int out, Place place, float lo, float hi,
                                        u32 addend) {
  if (place.row < ROWS) {
    const u32 sum = narrow(lo, hi);
    __stcg((u32*)(work.x + place.row * HIDDEN + out),
           narrow(__fadd_rn(low(addend), low(sum)), __fadd_rn(high(addend), high(sum))));
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    text_layers(const __grid_constant__ Work work) {
  Shared& shared = *(Shared*)block_memory();
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  for (int i = threadIdx.x; i < ROWS * (H / 2); i += THREADS) {
    const int from = i / (H / 2) * H + i % (H / 2);
    shared.cosines[0][i] = __ldg(work.cosines + from);
    shared.sines[0][i] = __ldg(work.sines + from);
  }
  if (threadIdx.x < ROWS) {
    shared.places[threadIdx.x] = __ldg(work.places + threadIdx.x);
    shared.starts[threadIdx.x] = __ldg(work.starts + threadIdx.x);
    shared.used[threadIdx.x] = (int)__ldg(work.used + threadIdx.x);
  }
  if (threadIdx.x == 0) {
    shared.down_splits[0] = work.down_firsts[blockIdx.x] / (HIDDEN / TILE);
    shared.down_splits[1] = (work.down_firsts[blockIdx.x + 1] - 1) / (HIDDEN / TILE);
  }

  const u32 ring = address(shared.rings[warp]);
  Loader loader = {work, shared, {0, 0, 0, nullptr, 0, 0, SLOTS}};
  const Place place = {lane >> 2, (lane & 3) * 2};
  u32 slot = 0;
#pragma unroll 1
  for (int step = 0; step < LAYERS * PHASES; step++) {
    const Layer& layer = work.layers[step / PHASES];
    const int phase = step % PHASES;
    const bool is_normed = phase == PROJECT || phase == MLP_IN;
    if (is_normed) load_norms(shared, layer, phase, warp, lane);
    // The last warp does without, see wait_for_all.
    if (warp < WARPS - 1) loader.fill(left_free(phase));
    __syncthreads();
    if (step > 0) wait_for_all(work.counters + GRID_COUNTER, step * BLOCKS);

    if (phase == ATTEND) {
      const int group = thread_now() / (GROUP_WARPS * 32);
      Item item;
#pragma unroll 1
      for (int at = blockIdx.x + BLOCKS * group; find_item(shared, at, item);
           at += BLOCKS * GROUPS)
        attend(work, layer, shared, item, shared.scratch[group], GROUP_BARRIER(group));
      continue;
    }

    const bool is_down = phase == MLP_OUT;
    const int pitch = (is_down ? DOWN_SPLIT : HIDDEN) * 2 + 16;
    const int row = thread_now() / ROW_THREADS, row_thread = thread_now() % ROW_THREADS;
    uint4* x = (uint4*)(shared.rows + row * pitch);
    bring_row(work, shared, phase, row, row_thread, x);
    loader.fill();
    if (is_normed) norm_row(shared, x, row, row_thread, work);
    Item item;
    if (phase == PROJECT &&
        find_item(shared, blockIdx.x + BLOCKS * (warp / GROUP_WARPS), item)) {
      // What attention will read into the second-level cache: a position a thread.
      const int key = item.split * SPLIT_KEYS + threadIdx.x % SPLIT_KEYS;
      const i64 at = ((shared.starts[item.row] + key) * KV_HEADS + item.head) * H;
      if (key < item.used - 1) {
        prefetch(layer.keys + at);
        prefetch(layer.keys + at + H / 2);
        prefetch(layer.values + at);
        prefetch(layer.values + at + H / 2);
      }
    }
    __syncthreads();

    const u32 rows_at =
        address(shared.rows) + ((lane & 7) < ROWS ? lane & 7 : 0) * pitch + (lane >> 3) * 16;
    Unit unit;
#pragma unroll 1
    for (int i = 0; find_unit(work, phase, i, warp, unit); i++) {
      float acc[2] = {0, 0};
      const int out = unit.tile * TILE + place.outputs;
      u32 addend = 0;  // what the sum is added to, asked for early
      if (place.row < ROWS) {
        if (phase == PROJECT)
          addend = __ldg((const u32*)(layer.biases[unit.matrix] + unit.row + place.outputs));
        else if (phase != MLP_IN)
          addend = __ldcg((const u32*)(work.x + place.row * HIDDEN + out));
      }
      u32 row_at = rows_at;
      row_at += is_down ? (unit.split - shared.down_splits[0]) * ROWS * pitch : unit.k * 2;
#pragma unroll 1
      for (int left = unit.length; left > 0; left -= 2 * BOX) {
        wait_for_groups<SLOTS - 1>();
        __syncwarp();
        Operands first, second;
        first.load(ring + slot * SLOT_BYTES, row_at, lane);
        second.load(ring + slot * SLOT_BYTES + BOX_BYTES, row_at + BOX * 2, lane);
        row_at += 4 * BOX;
        __syncwarp();
        loader.ahead.free++;
        // What belongs to later phases waits: others may still need the memory for this one.
        if (loader.ahead.step == step)
          loader.fill();
        else
          end_group();
        slot = slot + 1 == SLOTS ? 0 : slot + 1;
        first.multiply_into(acc);
        if (left > BOX) second.multiply_into(acc);
      }

      float2 other = make_float2(0, 0);
      if (!is_down) {
        float2* handed = shared.handed[warp >> 1] + lane;
        if (warp & 1) *handed = make_float2(acc[0], acc[1]);
        sync_some(PAIR_BARRIER(warp >> 1), 64);
        if (!(warp & 1)) other = *handed;
        sync_some(PAIR_BARRIER(warp >> 1), 64);
        if (warp & 1) continue;
      }
      float lo = __fadd_rn(acc[0], other.x), hi = __fadd_rn(acc[1], other.y);
      if (phase == PROJECT) {
        end_heads(work, unit, place, lo, hi, addend);
        continue;
      }
      if (phase == MLP_IN) {
        lo = silu_times(rounded(acc[0]), rounded(other.x));
        hi = silu_times(rounded(acc[1]), rounded(other.y));
        if (place.row < ROWS) *(u32*)(work.inner + place.row * INNER + out) = narrow(lo, hi);
        continue;
      }
      if (is_down) {
        const int size = ROWS * HIDDEN;
        float* parts = work.down_parts + place.row * HIDDEN + out;
        if (place.row < ROWS)
          __stcg((float2*)(parts + unit.split * size), make_float2(acc[0], acc[1]));
        __syncwarp();
        u32 ended = 0;
        if (lane == 0) ended = count_up(work.counters + DOWN_COUNTERS + unit.tile);
        ended = __shfl_sync(0xffffffffu, ended, 0);
        if ((ended + 1) % DOWN_SPLITS != 0) continue;
        // The last split to end adds up all, in their order.
        fence();
        lo = hi = 0;
        if (place.row < ROWS) {
          float2 two[DOWN_SPLITS];
#pragma unroll
          for (int s = 0; s < DOWN_SPLITS; s++) two[s] = __ldcg((const float2*)(parts + s * size));
#pragma unroll
          for (int s = 0; s < DOWN_SPLITS; s++)
            lo = __fadd_rn(lo, two[s].x), hi = __fadd_rn(hi, two[s].y);
        }
      }
      end_sum(work, out, place, lo, hi, addend);
    }
  }
}
