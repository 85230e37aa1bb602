"""Keys and values of the texts being generated: one slot per text, in two tensors that grow as texts do."""

import torch
from torch import Tensor

# How many slots and positions the pool begins with; each is doubled when it is too small.
FIRST_SLOTS = 8
FIRST_POSITIONS = 128


class KVPool:
    """At most `max_slots` texts of at most `max_positions` tokens. Used by one thread at a time.

    Args:
        like: a tensor of the device and dtype that keys and values shall have.
    """

    def __init__(
        self, num_layers: int, num_heads: int, head_dim: int, max_slots: int, max_positions: int, *, like: Tensor
    ) -> None:
        self.max_slots = max_slots
        self.max_positions = max_positions
        slots, positions = min(FIRST_SLOTS, max_slots), min(FIRST_POSITIONS, max_positions)
        # [layers, keys and values, slots, heads, positions, head_dim]
        shape = (num_layers, 2, slots, num_heads, positions, head_dim)
        self._data = torch.zeros(shape, device=like.device, dtype=like.dtype)
        self._free = list(range(slots))[::-1]
        # Positions that the running step reads, see `reserve`.
        self._num_seen = 0

    def take(self) -> int:
        """A free slot, of zeros: what an earlier text left, say the NaN of torn weights, would get through a mask.

        There has to be one below `max_slots`.
        """
        if not self._free:
            old = self._data.shape[2]
            assert old < self.max_slots
            self._grow(2, min(2 * old, self.max_slots))
            self._free.extend(range(self._data.shape[2] - 1, old - 1, -1))
        slot = self._free.pop()
        self._data[:, :, slot] = 0
        return slot

    def give(self, slot: int) -> None:
        """The slot is free again."""
        self._free.append(slot)

    def reserve(self, num_positions: int) -> None:
        """The next calls of `extend` read this many positions, new ones included."""
        assert num_positions <= self.max_positions
        self._num_seen = num_positions
        size = self._data.shape[4]
        if num_positions > size:
            while size < num_positions:
                size *= 2
            self._grow(4, min(size, self.max_positions))

    def extend(self, layer: int, slots: Tensor, positions: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keep `k` and `v` [batch, heads, length, head_dim] at `positions` [batch, length] of `slots` [batch]; all
        keys and values of those slots, up to the reserved positions.
        """
        kept = []
        for half, new in enumerate((k, v)):
            data = self._data[layer, half]
            data[slots[:, None], :, positions] = new.transpose(1, 2)
            kept.append(data[slots, :, : self._num_seen])
        return kept[0], kept[1]

    def read(self, slot: int, start: int, stop: int) -> Tensor:
        """A copy of what a slot holds at those positions, of all layers."""
        return self._data[:, :, slot, :, start:stop].clone()

    def write(self, slot: int, start: int, block: Tensor) -> None:
        """Put back what `read` gave."""
        stop = start + block.shape[3]
        self.reserve(stop)
        self._data[:, :, slot, :, start:stop] = block

    def release(self) -> int:
        """Give the memory back; slots stay taken, what they held is lost. The bytes that it freed. Idempotent."""
        storage = self._data.untyped_storage()
        num_bytes = storage.nbytes()
        storage.resize_(0)
        return num_bytes

    def restore(self) -> int:
        """Take the memory again, of zeros. The bytes that it took. Idempotent."""
        storage = self._data.untyped_storage()
        num_bytes = self._data.numel() * self._data.element_size()
        if storage.nbytes() == num_bytes:
            return 0
        storage.resize_(num_bytes)
        self._data.zero_()
        return num_bytes

    def _grow(self, dim: int, size: int) -> None:
        shape = list(self._data.shape)
        shape[dim] = size
        grown = self._data.new_zeros(shape)
        grown.narrow(dim, 0, self._data.shape[dim]).copy_(self._data)
        self._data = grown
