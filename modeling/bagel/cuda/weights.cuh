// Which warp multiplies which weights, and their way into shared memory ahead of use.

#pragma once

#include "turn.cuh"

struct Unit {
  int matrix, k, row, length;  // its first inner number and row, and how many inner numbers
  int tile, split;
};

// The i-th unit of a warp in a phase, if there is one. Two warps share a tile: they have its
// halves, or gate and up. In down a warp has a split of a tile for itself.
__device__ __forceinline__ bool find_unit(const Work& work, int phase, int i, int warp,
                                          Unit& unit) {
  if (phase == ATTEND) return false;
  if (phase == MLP_OUT) {
    const int at = work.down_firsts[blockIdx.x] + warp + i * WARPS;
    unit.split = at / (HIDDEN / TILE);
    unit.tile = at % (HIDDEN / TILE);
    unit.matrix = DOWN;
    unit.k = unit.split * DOWN_SPLIT;
    unit.row = unit.tile * TILE;
    unit.length = min(DOWN_SPLIT, INNER - unit.k);
    return at < work.down_firsts[blockIdx.x + 1];
  }
  // From the other end, so that no block has the most of everything.
  const u32 block = phase == PROJECT ? BLOCKS - 1 - blockIdx.x : blockIdx.x;
  unit.tile = block + BLOCKS * ((warp >> 1) + PAIRS * i);
  unit.split = warp & 1;
  unit.row = unit.tile * TILE;
  unit.k = unit.split * (HIDDEN / 2);
  unit.length = HIDDEN / 2;
  if (phase == ATTENDED) {
    unit.matrix = O;
    return unit.tile < HIDDEN / TILE;
  }
  if (phase == MLP_IN) {
    unit.matrix = GATE + unit.split;
    unit.k = 0;
    unit.length = HIDDEN;
    return unit.tile < INNER / TILE;
  }
  unit.matrix = Q;
  if (unit.row >= Q_SIZE) unit.matrix = K, unit.row -= Q_SIZE;
  if (unit.matrix == K && unit.row >= KV_SIZE) unit.matrix = V, unit.row -= KV_SIZE;
  return unit.tile < QKV_SIZE / TILE;
}

// What a warp loads ahead: the units of all phases, one after the other.
struct Ahead {
  int step, i, left;   // 5 a layer; next unit in it; inner numbers left of the unit at hand
  const u16* at;       // of this lane
  int four_rows;       // numbers from a weight row to the fourth behind it
  int slot, free;      // where the next numbers go; slots that nothing is loaded into
};

struct Loader {
  const Work& work;
  Shared& shared;
  Ahead ahead;

  // Goes on to the next unit; false if there is none.
  __device__ __forceinline__ bool begin_unit() {
    const int warp = thread_now() / 32, lane = thread_now() % 32;
    Unit unit;
#pragma unroll 1
    for (; ahead.step < LAYERS * PHASES; ahead.step++, ahead.i = 0) {
      if (find_unit(work, ahead.step % PHASES, ahead.i, warp, unit)) {
        const int size = unit.matrix == DOWN ? INNER : HIDDEN;
        ahead.at = work.layers[ahead.step / PHASES].weights[unit.matrix] +
                   (i64)(unit.row + (lane >> 3)) * size + unit.k + (lane & 7) * 8;
        ahead.four_rows = 4 * size;
        ahead.left = unit.length;
        ahead.i++;
        return true;
      }
    }
    return false;
  }

  // Begins to load free slots, in order, until `left` are: each a group of copies.
  __device__ __forceinline__ void fill(int left = 0) {
    const int warp = thread_now() / 32, lane = thread_now() % 32;
    const int chunk = lane & 7, chunk_row = lane >> 3;
    // Where the first slot has this lane's chunk of rows 0 to 3, swizzled.
    const u32 lane_at =
        address(shared.rings[warp]) + chunk_row * (BOX * 2) + ((chunk ^ chunk_row) << 4);
    const u64 policy = evict_first();
#pragma unroll 1
    for (; ahead.free > left; ahead.free--) {
      if (ahead.left > 0 || begin_unit()) {
        const u32 low = lane_at + ahead.slot * SLOT_BYTES;
        const u32 high = (low ^ 64) + 4 * BOX * 2;  // four rows on the swizzle is another
        copy16(low, ahead.at, policy);
        copy16(high, ahead.at + ahead.four_rows, policy);
        if (ahead.left > BOX) {
          copy16(low + BOX_BYTES, ahead.at + BOX, policy);
          copy16(high + BOX_BYTES, ahead.at + BOX + ahead.four_rows, policy);
        }
        ahead.at += 2 * BOX;
        ahead.left -= 2 * BOX;
      }
      ahead.slot = ahead.slot + 1 == SLOTS ? 0 : ahead.slot + 1;
      end_group();
    }
  }
};

