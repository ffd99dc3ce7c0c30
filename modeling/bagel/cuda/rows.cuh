// Products with rows in shared memory, and RMSNorm of those rows.

#pragma once

#include "turn.cuh"

// What the tensor core takes of a box: of the weights, and of the rows.
struct Operands {
  u32 weights[BOX / 8], rows[BOX / 8];

  __device__ __forceinline__ void load(u32 weights_at, u32 rows_at, int lane) {
    const int row = lane & 7, matrix = lane >> 3;
#pragma unroll
    for (int i = 0; i < BOX / 32; i++) {
      load_matrices(weights_at + row * (BOX * 2) + (((i * 4 + matrix) ^ row) << 4),
                    weights + 4 * i);
      load_matrices(rows_at + i * 64, rows + 4 * i);
    }
  }
  __device__ __forceinline__ void multiply_into(float* acc) const {
#pragma unroll
    for (int i = 0; i < BOX / 16; i++)
      multiply(acc, rows[2 * i], rows[2 * i + 1], weights[2 * i], weights[2 * i + 1]);
  }
};

__device__ __forceinline__ float silu_times(float gate, float up) {
  const float e = exp2_of(__fmul_rn(-gate, 1.4426950408889634f));
  return __fmul_rn(rounded(divide(gate, __fadd_rn(1.0f, e))), up);
}

// Two numbers of a row times the norm's scale and weight.
__device__ __forceinline__ u32 weighed(u32 x, u32 weight, float scale) {
  const u32 normed = narrow(__fmul_rn(low(x), scale), __fmul_rn(high(x), scale));
  return narrow(__fmul_rn(low(weight), low(normed)), __fmul_rn(high(weight), high(normed)));
}

// Adds the upper half of some sums to the lower one, again and again, until one is left.
template <int HALF>
__device__ __forceinline__ void add_halves(float* sums) {
#pragma unroll
  for (int i = 0; i < HALF; i++) sums[i] = __fadd_rn(sums[i], sums[i + HALF]);
  if constexpr (HALF > 1) add_halves<HALF / 2>(sums);
}

// RMSNorm of a row in shared memory, in place, by its ROW_THREADS; see `_rms_norm_kernel`.
__device__ __forceinline__ void norm_row(Shared& shared, uint4* x, int row, int thread,
                                         const Work& work) {
  const int lane = thread % 32;
  sync_some(ROW_BARRIER(row), ROW_THREADS);
#pragma unroll 1
  for (int at = thread; at < NORM_WIDTH; at += ROW_THREADS) {
    float a = 0, b = 0, c = 0, d = 0;
#pragma unroll
    for (int i = at; i < HIDDEN / 4; i += NORM_WIDTH) {
      const uint2 four = ((const uint2*)x)[i];
      a = __fadd_rn(a, __fmul_rn(low(four.x), low(four.x)));
      b = __fadd_rn(b, __fmul_rn(high(four.x), high(four.x)));
      c = __fadd_rn(c, __fmul_rn(low(four.y), low(four.y)));
      d = __fadd_rn(d, __fmul_rn(high(four.y), high(four.y)));
    }
    shared.sums[row][at] = __fadd_rn(__fadd_rn(__fadd_rn(a, b), c), d);
  }
  sync_some(ROW_BARRIER(row), ROW_THREADS);
  float sums[NORM_WIDTH / 32];
#pragma unroll
  for (int i = 0; i < NORM_WIDTH / 32; i++) sums[i] = shared.sums[row][lane + 32 * i];
  add_halves<NORM_WIDTH / 64>(sums);
  const float total = sum_of_lanes(sums[0]);
  const float scale = rsqrt_of(__fadd_rn(__fmul_rn(total, work.inverse_size), work.eps));
#pragma unroll 1
  for (int at = thread; at < HIDDEN / 8; at += ROW_THREADS) {
    const uint4 eight = x[at], by = shared.norm[at];
    x[at] = make_uint4(weighed(eight.x, by.x, scale), weighed(eight.y, by.y, scale),
                       weighed(eight.z, by.z, scale), weighed(eight.w, by.w, scale));
  }
}

