"""Memory that is lent to one decode cache at a time, and moves only when it has to grow."""

import weakref
from dataclasses import replace

import pytest
import torch

from modeling.bagel.cache_memory import CAPACITY_STEP, CacheMemory
from tests.tiny import cache_spec, contexts, contexts_over

TOKENS = [5, 77, 300, 12, 9, 41, 250]


class Log(list):
    """Counts how often the memory said that it moves."""

    def __call__(self) -> None:
        self.append("moved")


def addresses(memory: CacheMemory, rows: int, capacity: int) -> list[int]:
    with memory.lend(cache_spec(rows, capacity)) as cache:
        assert cache.num_rows == rows and cache.capacity >= capacity
        assert cache.capacity % CAPACITY_STEP == 0
        assert cache.lengths == cache.next_rope == [0] * rows
        assert cache.blanks == [(0, 0)] * rows
        cache.advance([rows - 1], [3], [3])  # no trace of it in the next cache
        cache.leave_blank([rows - 1], [2])
        return [x.data_ptr() for x in (*cache.keys, *cache.values)]


def test_it_stays_where_it_is_until_more_is_needed():
    log = Log()
    memory = CacheMemory(log)
    first = addresses(memory, 2, 100)
    log.clear()
    for rows, capacity in ((2, 100), (1, 256), (2, 256), (1, 1)):
        assert addresses(memory, rows, capacity) == first
    assert log == []
    addresses(memory, 2, 257)
    addresses(memory, 3, 40)
    assert log == ["moved"] * 2
    assert (memory.spec.rows, memory.spec.capacity) == (3, 512)  # room for what came before, too
    addresses(memory, 2, 512)
    assert len(log) == 2


def test_old_memory_is_let_go_before_new_memory_is_taken():
    memory = CacheMemory(lambda: seen.append([x.untyped_storage().size() for x in memory._keys]))
    seen: list = []
    addresses(memory, 1, 100)
    held = weakref.ref(memory._keys[0])
    addresses(memory, 1, 300)
    assert held() is None
    assert len(seen) == 2 and seen[0] == [] and min(seen[1]) > 0


def test_another_type_gets_memory_of_its_own():
    memory = CacheMemory(Log())
    addresses(memory, 4, 600)
    spec = replace(cache_spec(1, 10), dtype=torch.bfloat16)
    with memory.lend(spec) as cache:
        assert cache.keys[0].dtype == torch.bfloat16
    assert (memory.spec.rows, memory.spec.capacity) == (1, CAPACITY_STEP)


def test_it_is_lent_once_at_a_time():
    memory = CacheMemory(Log())
    spec = cache_spec(1)
    with memory.lend(spec) as cache:
        with pytest.raises(RuntimeError, match="lent already"), memory.lend(spec):
            pass
        assert memory.lent is cache  # the refused one has not taken it away
    with memory.lend(spec) as other:
        assert other is not cache


def test_it_comes_back_from_a_block_that_fails():
    memory = CacheMemory(Log())
    with pytest.raises(KeyboardInterrupt) as caught, memory.lend(cache_spec(1)) as cache:
        raise KeyboardInterrupt
    assert memory.lent is None
    with memory.lend(cache_spec(1)) as again:
        assert again.num_rows == 1
    assert cache.keys == [] and caught.tb is not None


@torch.no_grad()
def test_a_cache_that_was_given_back_is_not_used():
    memory = CacheMemory(Log())
    with memory.lend(cache_spec(1)) as cache:
        grown = contexts_over(cache)
        grown.feed_text([0], [TOKENS])
    with pytest.raises(IndexError):
        grown.feed_text([0], [TOKENS])


@torch.no_grad()
def test_what_earlier_rollouts_left_is_not_read():
    memory, hidden = CacheMemory(Log()), []
    for poison in (0.0, float("nan"), 1e30):
        with memory.lend(cache_spec(2)) as cache:
            for layer in (*cache.keys, *cache.values):
                layer.fill_(poison)
            grown = contexts_over(cache)
            grown.feed_text([0, 1], [TOKENS, TOKENS[:3]])
            hidden.append(grown.feed_text([1, 0], [TOKENS[3:], TOKENS[:1]]))
    fresh = contexts(2)
    fresh.feed_text([0, 1], [TOKENS, TOKENS[:3]])
    expected = fresh.feed_text([1, 0], [TOKENS[3:], TOKENS[:1]])
    for got in hidden:
        assert torch.equal(got, expected)


def test_released_memory_is_gone_and_comes_anew():
    log = Log()
    memory = CacheMemory(log)
    addresses(memory, 2, 100)
    log.clear()
    memory.release()
    assert memory.spec is None and memory._keys == memory._values == [] and log == ["moved"]
    addresses(memory, 1, 100)
    assert memory.spec.rows == 1
