// Runs the kernel on the CPU: a fiber a thread, until none is left.
//
// Time goes in rounds. For 8 of them half of the warps stand still, then others, and threads have
// their turns from the first to the last or from the last to the first: what is not ordered by a
// barrier comes in many orders.

#include SOURCE

static const Work* given;

static void begin() {
  KERNEL(*given);
  current->is_done = true;
  num_waits = 0;
  swapcontext(&current->context, &scheduler);
}

static bool stands_still(u64 round, u32 group) {
  u64 x = (round / 8 * 1000003 + group) * 0x9e3779b97f4a7c15;
  return (x ^ x >> 29) * 0xbf58476d1ce4e5b9 >> 63;
}

// 0, or 1 where the fibers wait for each other.
extern "C" int run_on_host(const Work* work, int num_blocks) {
  given = work;
  blocks.clear();
  blocks.resize(num_blocks);
  for (Block& block : blocks) {
    // What nobody has written is not zero.
    block.memory.assign(SHARED_BYTES, 0xff);
    block.warps.resize(WARPS);
  }
  fibers.clear();
  fibers.resize(num_blocks * THREADS);
  for (size_t i = 0; i < fibers.size(); i++) {
    Fiber& fiber = fibers[i];
    fiber.thread = i % THREADS;
    fiber.block = i / THREADS;
    fiber.stack.reset(new unsigned char[STACK_BYTES]);
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = STACK_BYTES;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, begin, 0);
  }
  num_waits = 0;
  size_t num_done = 0;
  for (u64 round = 0; num_done < fibers.size(); round++) {
    num_done = 0;
    for (size_t i = 0; i < fibers.size(); i++) {
      const size_t at = stands_still(round, 0) ? i : fibers.size() - 1 - i;
      Fiber& fiber = fibers[at];
      num_done += fiber.is_done;
      if (fiber.is_done || stands_still(round, 1 + at / 32)) continue;
      current = &fiber;
      swapcontext(&scheduler, &fiber.context);
    }
    if (num_waits > 1000 * fibers.size()) return 1;
  }
  return 0;
}
