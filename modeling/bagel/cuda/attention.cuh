// Attention of one query a sequence over the cache, split over keys; see `_few_queries_kernel`.

#pragma once

#include "turn.cuh"

struct Item {  // one KV head of one sequence over SPLIT_KEYS keys
  int row, head, split, num_splits, used;
};

__device__ __forceinline__ bool find_item(const Shared& shared, int at, Item& item) {
#pragma unroll 1
  for (item.row = 0; item.row < ROWS; item.row++) {
    item.used = shared.used[item.row];
    item.num_splits = (item.used + SPLIT_KEYS - 1) / SPLIT_KEYS;
    if (at < item.num_splits * KV_HEADS) {
      item.head = at % KV_HEADS;
      item.split = at / KV_HEADS;
      return true;
    }
    at -= item.num_splits * KV_HEADS;
  }
  return false;
}

// Norm and rotation of a head, 4 numbers a lane; see `_turn_heads`.
__device__ __forceinline__ uint2 turn_head(uint2 four, const uint2* weights, const float* cosines,
                                           const float* sines, float eps, int lane) {
  const uint2 by = weights[lane];
  const float4 cosine = ((const float4*)cosines)[lane & 15];
  const float4 sine = ((const float4*)sines)[lane & 15];
  const float x[4] = {low(four.x), high(four.x), low(four.y), high(four.y)};
  const float weight[4] = {low(by.x), high(by.x), low(by.y), high(by.y)};
  const float cosine_of[4] = {cosine.x, cosine.y, cosine.z, cosine.w};
  const float sine_of[4] = {sine.x, sine.y, sine.z, sine.w};
  float out[4], total = __fmul_rn(x[0], x[0]);
#pragma unroll
  for (int i = 1; i < 4; i++) total = __fadd_rn(total, __fmul_rn(x[i], x[i]));
  total = sum_of_lanes(total);
  const float scale = rsqrt_of(__fadd_rn(__fmul_rn(total, 1.0f / H), eps));
  const float sign = lane < 16 ? -1.0f : 1.0f;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    float mine = __fmul_rn(x[i], scale);
    if (ROUNDS_EARLY) mine = rounded(mine);
    mine = __fmul_rn(weight[i], mine);
    if (ROUNDS_EARLY) mine = rounded(mine);
    // The number of the other half of the head went through the same steps.
    const float other = __shfl_xor_sync(0xffffffffu, mine, 16);
    const float c = ROUNDS_EARLY ? rounded(cosine_of[i]) : cosine_of[i];
    const float s = ROUNDS_EARLY ? rounded(sine_of[i]) : sine_of[i];
    float left = __fmul_rn(mine, c), right = __fmul_rn(__fmul_rn(other, sign), s);
    if (ROUNDS_EARLY) left = rounded(left), right = rounded(right);
    out[i] = __fadd_rn(left, right);
  }
  return make_uint2(narrow(out[0], out[1]), narrow(out[2], out[3]));
}

// Keys of a block, as the tensor core takes them: the warp's two tiles of 8, all of the head. The
// newest is not in the cache yet.
__device__ __forceinline__ void load_keys(const u16* head, int first, int last_key,
                                          u32 (&keys)[2][16], int warp, int lane) {
#pragma unroll
  for (int tile = 0; tile < 2; tile++) {
    const int key = first + (warp + 4 * tile) * 8 + (lane >> 2);
    const u32* from = (const u32*)(head + (i64)key * KV_SIZE) + (lane & 3);
    const bool is_there = key < last_key;
#pragma unroll
    for (int i = 0; i < 16; i++) keys[tile][i] = is_there ? from[i * 4] : 0;
  }
}

// Values of a block: positions by dimensions as they lie, four tiles of 8 dimensions a warp. The
// newest is not in the cache yet.
__device__ __forceinline__ void load_values(const u16* head, int first, int last_key,
                                            u32 (&values)[4][8], int warp, int lane) {
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const int key = first + i * 8 + (lane >> 2);
    const u32* from = (const u32*)(head + (i64)key * KV_SIZE) + warp * 4 + (lane & 3);
    const bool is_there = key < last_key;
#pragma unroll
    for (int tile = 0; tile < 4; tile++) values[tile][i] = is_there ? from[tile * 16] : 0;
  }
}

// A split of a query: its largest score, its total, and 8 of its sums.
struct Part {
  float2 stat;
  float4 lower, upper;
};

// Those of the splits from `begin` on, of which the last one stands for those behind it.
__device__ __forceinline__ void load_parts(const float2* stats, const float* parts, int begin,
                                           int num_splits, Part (&to)[JOINED_AT_ONCE]) {
#pragma unroll
  for (int i = 0; i < JOINED_AT_ONCE; i++) {
    const int from = min(begin + i, num_splits - 1);
    to[i].stat = __ldcg(stats + from * 8);
    to[i].lower = __ldcg((const float4*)(parts + from * (8 * H)));
    to[i].upper = __ldcg((const float4*)(parts + from * (8 * H)) + 1);
  }
}

// The last group to end joins all splits, in their order: 16 threads a query, 8 numbers each.
__device__ __forceinline__ void join_splits(const Work& work, const Item& item, int first_part,
                                            u16* out, int thread) {
  const int query = thread >> 4, lane = thread & 15;
  const float2* stats = (const float2*)work.item_stats + first_part * 8 + query;
  const float* parts = work.item_parts + (first_part * 8 + query) * H + lane * 8;
  float top = -1e30f, total = 0, sums[8] = {};
  Part next[JOINED_AT_ONCE];
  load_parts(stats, parts, 0, item.num_splits, next);
#pragma unroll 1
  for (int begin = 0; begin < item.num_splits; begin += JOINED_AT_ONCE) {
    Part here[JOINED_AT_ONCE];
#pragma unroll
    for (int i = 0; i < JOINED_AT_ONCE; i++) here[i] = next[i];
    load_parts(stats, parts, begin + JOINED_AT_ONCE, item.num_splits, next);
#pragma unroll
    for (int i = 0; i < JOINED_AT_ONCE; i++) {
      if (begin + i >= item.num_splits) break;
      const float2 stat = here[i].stat;
      const float new_top = fmaxf(top, stat.x);
      const float shrink = exp2_of(__fsub_rn(top, new_top));
      const float weight = exp2_of(__fsub_rn(stat.x, new_top));
      const float4 lower = here[i].lower, upper = here[i].upper;
      const float part[8] = {lower.x, lower.y, lower.z, lower.w,
                             upper.x, upper.y, upper.z, upper.w};
      total = __fmaf_rn(total, shrink, __fmul_rn(weight, stat.y));
#pragma unroll
      for (int j = 0; j < 8; j++)
        sums[j] = __fmaf_rn(sums[j], shrink, __fmul_rn(weight, part[j]));
      top = new_top;
    }
  }
  if (query >= GROUP) return;
#pragma unroll
  for (int j = 0; j < 8; j++) sums[j] = divide(sums[j], total);
  *(uint4*)(out + query * H + lane * 8) =
      make_uint4(narrow(sums[0], sums[1]), narrow(sums[2], sums[3]), narrow(sums[4], sums[5]),
                 narrow(sums[6], sums[7]));
}

__device__ __forceinline__ void attend(const Work& work, const Layer& layer, const Shared& shared,
                                       const Item& item, Scratch& scratch, int barrier) {
  const int warp = thread_now() / 32 % GROUP_WARPS, lane = thread_now() % 32;
  const int g = lane >> 2, q = lane & 3;  // where a lane stands in the tensor core's fragments
  const int threads = GROUP_WARPS * 32, last_key = item.used - 1;
  const i64 head_at = (shared.starts[item.row] * KV_HEADS + item.head) * H;
  const bool has_new = item.split == item.num_splits - 1;
  // The warp's heads, asked for in front of keys. Behind the queries it is the newest key's turn.
  uint2 heads[2], newest = make_uint2(0, 0);
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int query = warp + i * GROUP_WARPS;
    const u16* from = work.heads + (query < GROUP
                                        ? item.row * Q_SIZE + (item.head * GROUP + query) * H
                                        : ROWS * Q_SIZE + item.row * KV_SIZE + item.head * H);
    heads[i] = __ldcg((const uint2*)from + lane);
    if (query == GROUP) newest = __ldcg((const uint2*)(from + ROWS * KV_SIZE) + lane);
  }
  u32 keys[2][16], values[4][8], queries[16];
  int first = item.split * SPLIT_KEYS;
  load_keys(layer.keys + head_at, first, last_key, keys, warp, lane);
#pragma unroll 1
  for (int i = 0; i < 2; i++) {
    const int query = warp + i * GROUP_WARPS;
    const bool is_key = query >= GROUP;
    const uint2 turned =
        turn_head(i == 0 ? heads[0] : heads[1], shared.head_norms[is_key],
                  shared.cosines[item.row], shared.sines[item.row], work.eps, lane);
    *(uint2*)(scratch.queries + query * QUERY_PITCH + lane * 8) =
        is_key ? make_uint2(0, 0) : turned;
    if (query == GROUP && has_new) {
      const i64 place = (shared.places[item.row] * KV_HEADS + item.head) * H;
      *((uint2*)(layer.keys + place) + lane) = turned;
      *((uint2*)(layer.values + place) + lane) = newest;
      *((uint2*)scratch.key + lane) = turned;
      *((uint2*)scratch.value + lane) = newest;
    }
  }
  load_values(layer.values + head_at, first, last_key, values, warp, lane);
  sync_some(barrier, threads);
#pragma unroll
  for (int i = 0; i < 4; i++)
    load_matrices(address(scratch.queries) + (lane & 7) * QUERY_PITCH + i * 64 + (lane >> 3) * 16,
                  queries + 4 * i);
  float acc[4][2] = {}, top = -INFINITY_F, total = 0, scaled_top = 0;
  // What the second block needs is asked for as soon as there are registers for it.
#pragma unroll 1
  for (int is_second = 0; is_second < 2; is_second++, first += BLOCK_KEYS) {
    float scores[2][2] = {};
#pragma unroll
    for (int tile = 0; tile < 2; tile++)
      if (has_new && first + (warp + 4 * tile) * 8 + g == last_key) {
#pragma unroll
        for (int i = 0; i < 16; i++) keys[tile][i] = scratch.key[i * 4 + q];
      }
#pragma unroll
    for (int i = 0; i < 8; i++)
#pragma unroll
      for (int tile = 0; tile < 2; tile++)
        multiply(scores[tile], queries[2 * i], queries[2 * i + 1], keys[tile][2 * i],
                 keys[tile][2 * i + 1]);
    if (!is_second)
      load_keys(layer.keys + head_at, first + BLOCK_KEYS, last_key, keys, warp, lane);
    float most = -INFINITY_F;
#pragma unroll
    for (int tile = 0; tile < 2; tile++)
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const int key = first + (warp + 4 * tile) * 8 + 2 * q + i;
        if (key >= item.used) scores[tile][i] = -1e30f;
        most = fmaxf(most, scores[tile][i]);
      }
    most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
    most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
    if (q == 0) scratch.tops[warp][g] = most;
    sync_some(barrier, threads);
#pragma unroll
    for (int i = 0; i < GROUP_WARPS; i++) most = fmaxf(most, scratch.tops[i][g]);
    const float new_top = fmaxf(top, most);
    const float shrink = exp2_of(__fmul_rn(work.scale, __fsub_rn(top, new_top)));
    scaled_top = __fmul_rn(work.scale, new_top);
    top = new_top;
    float weights[4];
#pragma unroll
    for (int i = 0; i < 4; i++)
      weights[i] = exp2_of(__fmaf_rn(work.scale, scores[i >> 1][i & 1], -scaled_top));
    float sum = __fadd_rn(__fadd_rn(__fadd_rn(weights[0], weights[1]), weights[2]), weights[3]);
    sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, 2));
    sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, 1));
    if (q == 0) scratch.totals[warp][g] = sum;
#pragma unroll
    for (int tile = 0; tile < 2; tile++)
      *(u32*)(scratch.weights + g * WEIGHT_PITCH + ((warp + 4 * tile) * 8 + 2 * q) * 2) =
          narrow(weights[2 * tile], weights[2 * tile + 1]);
    sync_some(barrier, threads);
    sum = __fadd_rn(__fadd_rn(scratch.totals[0][g], scratch.totals[2][g]),
                    __fadd_rn(scratch.totals[1][g], scratch.totals[3][g]));
    total = __fmaf_rn(total, shrink, sum);
    u32 fragments[8];
#pragma unroll
    for (int i = 0; i < 2; i++)
      load_matrices(
          address(scratch.weights) + (lane & 7) * WEIGHT_PITCH + i * 64 + (lane >> 3) * 16,
          fragments + 4 * i);
#pragma unroll
    for (int i = 0; i < 8; i++)
      if (has_new && first + i * 8 + g == last_key) {
#pragma unroll
        for (int tile = 0; tile < 4; tile++)
          values[tile][i] = scratch.value[tile * 16 + warp * 4 + q];
      }
#pragma unroll
    for (int tile = 0; tile < 4; tile++) {
      acc[tile][0] = __fmul_rn(acc[tile][0], shrink);
      acc[tile][1] = __fmul_rn(acc[tile][1], shrink);
#pragma unroll
      for (int i = 0; i < 4; i++)
        multiply(acc[tile], fragments[2 * i], fragments[2 * i + 1],
                 transposed(values[tile][2 * i]), transposed(values[tile][2 * i + 1]));
    }
    if (!is_second)
      load_values(layer.values + head_at, first + BLOCK_KEYS, last_key, values, warp, lane);
  }
  const int pair = item.row * KV_HEADS + item.head, first_part = pair * work.max_splits;
  const int part = (first_part + item.split) * 8 + g, dimension = warp * 8 + 2 * q;
#pragma unroll
  for (int tile = 0; tile < 4; tile++)
    __stcg((float2*)(work.item_parts + part * H + tile * 32 + dimension),
           make_float2(acc[tile][0], acc[tile][1]));
  if (warp == 0 && q == 0)
    __stcg((float2*)work.item_stats + part, make_float2(scaled_top, total));
  sync_some(barrier, threads);
  u32* counter = work.counters + ITEM_COUNTERS + pair;
  if (warp == 0 && lane == 0) scratch.num_ended = count_up(counter);
  sync_some(barrier, threads);
  if (scratch.num_ended != item.num_splits - 1) return;
  u16* out = work.attended + item.row * Q_SIZE + item.head * GROUP * H;
  join_splits(work, item, first_part, out, warp * 32 + lane);
  if (warp == 0 && lane == 0) *counter = 0;
}
