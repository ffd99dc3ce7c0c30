// The wait for other blocks of a launch, all of which run at once.

#pragma once

#include "basics.cuh"

#define THREADS (WARPS * 32)

// Waits until some blocks have come here `count` times in all. The last thread of the block speaks
// for it: a release waits for the loads of its warp, and that warp has none under way.
__device__ __forceinline__ void wait_for_all(u32* counter, u32 count) {
  if (threadIdx.x == THREADS - 1) {
    announce(counter);
    while (seen(counter) < count) {
    }
  }
  __syncthreads();
}
