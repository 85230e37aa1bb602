"""Keys and values of prompts that were computed before, for prompts that begin alike.

Kept in blocks of BLOCK_TOKENS, each under the weights that computed it and all tokens up to its end. `weights` is what
a change of weights makes new (also back to an earlier version), the base model's or the adapter's, so an entry can't
serve other weights.
"""

from collections import OrderedDict
from collections.abc import Sequence

from torch import Tensor

from rlbus.workers.torch_lm.kv import KVPool

BLOCK_TOKENS = 16
# Blocks that are kept at most; the least recently used go first.
MAX_BLOCKS = 1024

# Of the base model alone, or with the number of an adapter.
Weights = int | tuple[int, int]
Key = tuple[Weights, tuple[int, ...]]


class PrefixCache:
    """The blocks. Used by one thread at a time."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[Key, Tensor] = OrderedDict()
        # Tokens that were found, and that were looked for, since the start.
        self.num_hit_tokens = 0
        self.num_asked_tokens = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def load(self, weights: Weights, tokens: Sequence[int], pool: KVPool, slot: int) -> int:
        """Put into `slot` what is known of the beginning of `tokens`; how many tokens. Never all of them, since the
        last one's output is needed.
        """
        self.num_asked_tokens += len(tokens)
        start = 0
        for stop in range(BLOCK_TOKENS, len(tokens), BLOCK_TOKENS):
            key = (weights, tuple(tokens[:stop]))
            block = self._blocks.get(key)
            if block is None:
                break
            self._blocks.move_to_end(key)
            pool.write(slot, start, block)
            start = stop
        self.num_hit_tokens += start
        return start

    def keep(self, weights: Weights, tokens: Sequence[int], pool: KVPool, slot: int) -> None:
        """Keep the whole blocks of `tokens`, which `slot` holds, as computed by `weights` alone."""
        for stop in range(BLOCK_TOKENS, len(tokens) + 1, BLOCK_TOKENS):
            key = (weights, tuple(tokens[:stop]))
            if key not in self._blocks:
                self._blocks[key] = pool.read(slot, stop - BLOCK_TOKENS, stop)
            self._blocks.move_to_end(key)
        while len(self._blocks) > MAX_BLOCKS:
            self._blocks.popitem(last=False)

    def clear(self) -> None:
        """Forget everything."""
        self._blocks.clear()
