// What all parts of the text turn share: sizes, the kernel's argument, shared memory.

#pragma once

#include "grid.cuh"

#define PAIRS (WARPS / 2)
#define TILE 8              // outputs of a tile: n of the tensor core's instruction
#define BOX 64              // inner numbers of a box: a line of memory for each output
#define BOX_BYTES (TILE * BOX * 2)
#define SLOT_BYTES (2 * BOX_BYTES)
#define H 128               // head size
#define GROUP (HEADS / KV_HEADS)
#define Q_SIZE (HEADS * H)
#define KV_SIZE (KV_HEADS * H)
#define QKV_SIZE (Q_SIZE + 2 * KV_SIZE)
#define ROW_WARPS (WARPS / ROWS)  // that bring and norm a row
#define ROW_THREADS (ROW_WARPS * 32)
#define MOST_CHUNKS ((HIDDEN / 8 + ROW_THREADS - 1) / ROW_THREADS)
#define GROUP_WARPS 4       // of an attention item
#define GROUPS (WARPS / GROUP_WARPS)
#define QUERY_PITCH (H * 2 + 16)
#define WEIGHT_PITCH (BLOCK_KEYS * 2 + 16)
#define JOINED_AT_ONCE 3
#define GRID_COUNTER 0      // from DOWN_COUNTERS on those of the tiles of down, then attention's
#define ITEM_COUNTERS (DOWN_COUNTERS + HIDDEN / TILE)

// Named barriers: 0 is the block's; a row's or a pair's warps; an attention group's.
#define ROW_BARRIER(row) (1 + (row))
#define PAIR_BARRIER(pair) (1 + (pair))
#define GROUP_BARRIER(group) (1 + PAIRS + (group))

static_assert(WARPS % ROWS == 0 && ROWS <= TILE && GROUP < TILE, "rows or queries of a group");
static_assert(Q_SIZE == HIDDEN && HIDDEN % (2 * BOX) == 0 && INNER % BOX == 0, "sizes");
static_assert(SPLIT_KEYS == 2 * BLOCK_KEYS && BLOCK_KEYS == GROUP_WARPS * 16, "two blocks");
static_assert(DOWN_SPLIT % BOX == 0 && DOWN_SPLIT <= HIDDEN, "splits of down");

enum Matrix { Q, K, V, O, GATE, UP, DOWN, MATRICES };
enum Phase { PROJECT, ATTEND, ATTENDED, MLP_IN, MLP_OUT, PHASES };

struct Layer {
  const u16* weights[MATRICES];  // [outputs, inner] each
  const u16* biases[3];          // of q, k and v
  const u16 *norm, *mlp_norm, *q_norm, *k_norm;
  u16 *keys, *values;            // of the cache, by position: [*, KV_HEADS, H]
};

struct Work {
  u16* x;                   // [ROWS, HIDDEN], the residual stream, in place
  u16 *heads, *attended;    // q, k and v, each [ROWS, *]; [ROWS, HIDDEN]
  u16* inner;               // [ROWS, INNER]
  float *down_parts, *item_parts, *item_stats;
  u32* counters;            // zero at the start
  const float *cosines, *sines;  // [ROWS, H]
  const i64 *places, *used;      // [ROWS]: positions of the new token, and of keys with it
  const int* starts;             // [ROWS]: first positions
  float eps, inverse_size, scale;
  int max_splits;
  u16 down_firsts[BLOCKS + 1];  // first unit of each block in down, and behind the last one
  Layer layers[LAYERS];
};
static_assert(sizeof(Work) == WORK_BYTES, "as packed by text_layers.py");

struct __align__(16) Scratch {  // of an attention group
  unsigned char queries[8 * QUERY_PITCH];
  unsigned char weights[8 * WEIGHT_PITCH];
  u32 key[H / 2], value[H / 2];  // the newest
  float tops[GROUP_WARPS][8], totals[GROUP_WARPS][8];
  u32 num_ended;
};

struct __align__(128) Shared {
  unsigned char rings[WARPS][SLOTS * SLOT_BYTES];
  union {
    unsigned char rows[ROWS_BYTES];
    Scratch scratch[GROUPS];
  };
  uint4 norm[HIDDEN / 8];
  float sums[ROWS][NORM_WIDTH];
  float2 handed[PAIRS][32];
  float cosines[ROWS][H / 2], sines[ROWS][H / 2];  // both halves of a head turn alike
  i64 places[ROWS], starts[ROWS];
  int used[ROWS];
  int down_splits[2];           // the first and the last one of which the block has units
  uint2 head_norms[2][H / 4];   // of queries and keys, of the layer at hand
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "shared memory");

__device__ __forceinline__ float sum_of_lanes(float x) {
#pragma unroll
  for (int half = 16; half >= 1; half /= 2)
    x = __fadd_rn(x, __shfl_xor_sync(0xffffffffu, x, half));
  return x;
}

