"""The pool of keys and values grows without forgetting."""

import pytest

pytest.importorskip("torch")

import torch

from rlbus.workers.torch_lm.kv import FIRST_POSITIONS, FIRST_SLOTS, KVPool

pytestmark = pytest.mark.unit


def pool() -> KVPool:
    """One layer, one head of two dimensions."""
    return KVPool(1, 1, 2, 20, 300, like=torch.zeros(1))


def test_growing_keeps_what_was_there() -> None:
    """In both directions, up to the limits."""
    kept = pool()
    slots = [kept.take() for _ in range(20)]
    assert len(set(slots)) == 20
    assert len(set(slots)) > FIRST_SLOTS
    block = torch.arange(20.0).view(1, 2, 1, 5, 2)
    kept.write(slots[3], 10, block)
    kept.reserve(300)
    assert kept.max_positions > FIRST_POSITIONS
    assert torch.equal(kept.read(slots[3], 10, 15), block)


def test_a_slot_is_given_out_empty() -> None:
    """What an earlier text left is gone."""
    kept = pool()
    slot = kept.take()
    kept.write(slot, 0, torch.ones(1, 2, 1, 5, 2))
    kept.give(slot)
    assert kept.take() == slot
    assert kept.read(slot, 0, 5).sum() == 0


def test_extend_returns_everything_of_each_row() -> None:
    """Old positions and new ones, in order, for the rows that were asked for."""
    kept = pool()
    first, second = kept.take(), kept.take()
    kept.write(first, 0, torch.full((1, 2, 1, 2, 2), 7.0))
    kept.reserve(3)
    new = torch.tensor([[[[1.0, 1.0]]], [[[2.0, 2.0]]]])
    k, v = kept.extend(0, torch.tensor([first, second]), torch.tensor([[2], [0]]), new, new + 1)
    assert k[:, 0, :, 0].tolist() == [[7, 7, 1], [2, 0, 0]]
    assert v[:, 0, :, 0].tolist() == [[7, 7, 2], [3, 0, 0]]
