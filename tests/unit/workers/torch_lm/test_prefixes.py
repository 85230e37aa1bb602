"""Cached prompts serve the weights that computed them, and nobody else."""

import pytest

pytest.importorskip("torch")

import torch

from rlbus.workers.torch_lm.kv import KVPool
from rlbus.workers.torch_lm.prefixes import BLOCK_TOKENS, MAX_BLOCKS, PrefixCache

pytestmark = pytest.mark.unit


def filled(value: float) -> tuple[KVPool, int]:
    """A pool with one slot of `value`."""
    pool = KVPool(1, 1, 2, 2, 4096, like=torch.zeros(1))
    slot = pool.take()
    pool.write(slot, 0, torch.full((1, 2, 1, 64, 2), value))
    return pool, slot


def test_longest_common_beginning_in_whole_blocks_is_found() -> None:
    """And never the last token, whose output is needed."""
    pool, slot = filled(3.0)
    cache = PrefixCache()
    text = list(range(40))
    cache.keep(1, text, pool, slot)
    assert len(cache) == 2
    fresh = pool.take()
    assert cache.load(1, text, pool, fresh) == 32
    assert torch.equal(pool.read(fresh, 0, 32), pool.read(slot, 0, 32))
    assert cache.load(1, text[:32], pool, fresh) == 16
    assert cache.load(1, [*text[:20], 99, *text[21:]], pool, fresh) == 16
    assert cache.load(1, [99, *text[1:]], pool, fresh) == 0


def test_other_weights_find_nothing() -> None:
    """A number is never used again, so neither does a version that comes back."""
    pool, slot = filled(3.0)
    cache = PrefixCache()
    text = list(range(40))
    cache.keep(1, text, pool, slot)
    assert cache.load(2, text, pool, slot) == 0
    assert (cache.num_hit_tokens, cache.num_asked_tokens) == (0, 40)
    cache.clear()
    assert cache.load(1, text, pool, slot) == 0


def test_the_least_recently_used_blocks_go_first() -> None:
    """The cache has a bound."""
    pool, slot = filled(0.0)
    cache = PrefixCache()
    first = [0] * (BLOCK_TOKENS + 1)
    cache.keep(1, first, pool, slot)
    for number in range(1, MAX_BLOCKS):
        cache.keep(1, [number] * BLOCK_TOKENS, pool, slot)
    assert cache.load(1, first, pool, slot) == BLOCK_TOKENS
    cache.keep(1, [MAX_BLOCKS] * BLOCK_TOKENS, pool, slot)
    assert len(cache) == MAX_BLOCKS
    assert cache.load(1, first, pool, slot) == BLOCK_TOKENS
    assert cache.load(1, [1] * (BLOCK_TOKENS + 1), pool, slot) == 0
