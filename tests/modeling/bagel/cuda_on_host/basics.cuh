// basics.cuh for a CPU: every thread of every block is a fiber of one operating-system thread.
//
// What threads of a warp do together waits until all 32 have come to it; a barrier until all of its
// threads have. Copies into shared memory happen as late as they may, when they are waited for, or
// with EAGER_COPIES as soon as they may. Where no fiber can go on the run ends with an error.

#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

struct uint2 { u32 x, y; };
struct alignas(16) uint4 { u32 x, y, z, w; };
struct float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct Dim { u32 x; };
inline uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
using std::min;

// ---- fibers

struct Meeting {  // of some threads, again and again
  int num_here = 0;
  u64 round = 0;
};

struct Warp {
  Meeting meeting;
  u64 given[2][32][2];  // what lanes bring, for this meeting and the one before it
};

struct Block {
  std::vector<unsigned char> memory;
  Meeting barriers[16];
  std::vector<Warp> warps;
};

struct Copy {
  unsigned char* to;
  const void* from;
};

struct Fiber {
  ucontext_t context;
  std::unique_ptr<unsigned char[]> stack;
  u32 thread, block;
  std::vector<std::vector<Copy>> groups = {{}};  // the last one is open
  bool is_done = false;
};

inline std::vector<Fiber> fibers;
inline std::vector<Block> blocks;
inline Fiber* current;
inline ucontext_t scheduler;
inline u64 num_waits;  // since a fiber last went on

constexpr size_t STACK_BYTES = 256 * 1024;

inline void yield() {
  num_waits++;
  swapcontext(&current->context, &scheduler);
}

inline Block& my_block() { return blocks[current->block]; }
inline Warp& my_warp() { return my_block().warps[current->thread / 32]; }

inline void meet(Meeting& meeting, int num_threads) {
  const u64 round = meeting.round;
  num_waits = 0;
  if (++meeting.num_here == num_threads) {
    meeting.num_here = 0;
    meeting.round++;
    return;
  }
  while (meeting.round == round) yield();
}

// Brings two numbers to a meeting of the warp: those of all lanes.
inline const u64 (*share(u64 first, u64 second = 0))[2] {
  Warp& warp = my_warp();
  auto& given = warp.given[warp.meeting.round % 2];
  given[current->thread % 32][0] = first;
  given[current->thread % 32][1] = second;
  meet(warp.meeting, 32);
  return given;
}

// ---- the language

#define __device__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(threads, blocks)
#define __align__(bytes) alignas(bytes)
#define threadIdx (Dim{current->thread})
#define blockIdx (Dim{current->block})
#define gridDim (Dim{(u32)blocks.size()})
#define INFINITY_F INFINITY

template <typename To, typename From>
inline To bits(From from) {
  To to;
  static_assert(sizeof(To) == sizeof(From), "sizes");
  memcpy(&to, &from, sizeof(to));
  return to;
}
inline float __uint_as_float(u32 x) { return bits<float>(x); }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fsub_rn(float x, float y) { return x - y; }
inline float __fmaf_rn(float x, float y, float z) { return fmaf(x, y, z); }
template <typename T>
inline T __ldg(const T* at) { return *at; }
template <typename T>
inline T __ldcg(const T* at) { return *at; }
template <typename T>
inline void __stcg(T* at, T value) { *at = value; }
inline void __syncwarp() { share(0); }
inline void __syncthreads() { meet(my_block().barriers[0], my_block().warps.size() * 32); }
template <typename T>
inline T __shfl_sync(u32, T x, int lane) {
  return bits<T>((u32)share(bits<u32>(x))[lane][0]);
}
template <typename T>
inline T __shfl_xor_sync(u32, T x, int mask) {
  return bits<T>((u32)share(bits<u32>(x))[(current->thread % 32) ^ mask][0]);
}
inline u32 __shfl_up_sync(u32, u32 x, int step) {
  const auto* all = share(x);
  const int lane = current->thread % 32;
  return all[lane < step ? lane : lane - step][0];
}
inline u32 atomicAdd(u32* to, u32 x) {
  const u32 before = *to;
  *to += x;
  return before;
}

// ---- basics.cuh

inline float low(u32 two) { return __uint_as_float(two << 16); }
inline float high(u32 two) { return __uint_as_float(two & 0xffff0000u); }
inline u32 half_of(float x) {
  const u32 wide = bits<u32>(x);
  if (x != x) return 0x7fff;
  return (wide + 0x7fff + (wide >> 16 & 1)) >> 16;
}
inline u32 narrow(float lo, float hi) { return half_of(lo) | half_of(hi) << 16; }
inline float rounded(float x) { return low(half_of(x)); }
inline float exp2_of(float x) { return exp2f(x); }
inline float divide(float x, float y) { return x / y; }
inline float rsqrt_of(float x) { return 1 / sqrtf(x); }

inline int thread_now() { return current->thread; }
inline unsigned char* block_memory() { return my_block().memory.data(); }
inline u32 address(const void* p) { return (const unsigned char*)p - block_memory(); }
inline void sync_some(int barrier, int threads) { meet(my_block().barriers[barrier], threads); }
inline u32 count_up(u32* counter) { return (*counter)++; }
inline void announce(u32* counter) { ++*counter, num_waits = 0; }
inline u32 seen(u32* counter) {
  yield();
  return *counter;
}
inline void fence() {}
inline u64 evict_first() { return 0; }
inline void prefetch(const u16*) {}

inline void make(const Copy& copy) { memcpy(copy.to, copy.from, 16); }
inline void copy16(u32 to, const u16* from, u64) {
  const Copy copy = {block_memory() + to, from};
#ifdef EAGER_COPIES
  make(copy);
#else
  current->groups.back().push_back(copy);
#endif
}
inline void end_group() { current->groups.emplace_back(); }
template <int NUM_LEFT>
inline void wait_for_groups() {
  auto& groups = current->groups;
  while (groups.size() > NUM_LEFT + 1) {
    for (const Copy& copy : groups.front()) make(copy);
    groups.erase(groups.begin());
  }
}

inline void load_matrices(u32 at, u32* to) {
  const auto* rows = share(at);
  const int lane = current->thread % 32;
  for (int i = 0; i < 4; i++)
    memcpy(to + i, block_memory() + rows[8 * i + lane / 4][0] + lane % 4 * 4, 4);
  share(0);  // all have read before any goes on to write
}
inline u32 transposed(u32 x) {
  const auto* rows = share(x);
  const int lane = current->thread % 32, column = lane / 4, row = lane % 4 * 2;
  auto one = [&](int r) { return (u32)rows[r * 4 + column / 2][0] >> column % 2 * 16 & 0xffff; };
  return one(row) | one(row + 1) << 16;
}
inline void multiply(float* acc, u32 a0, u32 a2, u32 b0, u32 b1) {
  const int lane = current->thread % 32, row = lane / 4;
  const auto* as = share((u64)a0 | (u64)a2 << 32, (u64)b0 | (u64)b1 << 32);
  for (int j = 0; j < 2; j++) {
    const int column = lane % 4 * 2 + j;
    for (int k = 0; k < 16; k++) {
      const int from = k % 8 / 2, part = k / 8 * 32 + k % 2 * 16;
      const float a = low(as[row * 4 + from][0] >> part & 0xffff);
      const float b = low(as[column * 4 + from][1] >> part & 0xffff);
      acc[j] += a * b;
    }
  }
}
