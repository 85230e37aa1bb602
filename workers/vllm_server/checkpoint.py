"""Which tensors a model expects. Free of torch.

vLLM accepts incomplete checkpoints with a log line, and tears the model on truncated ones (facts/vllm-cpu.md 5), so
both are found by this, and by `rlbus.workers.checkpoint`, before it is asked to load anything.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rlbus.schemas import TensorSpec
from rlbus.transfer.manifest import compare, num_bytes
from rlbus.workers.checkpoint import accepts

HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class ExpectedTensors:
    """The tensors that a full update of one model consists of, by checkpoint name.

    `optional` may be left out: vLLM ignores them, as the head of a model that ties it to the embedding. `source` says
    in words where the list comes from.
    """

    tensors: tuple[TensorSpec, ...]
    optional: frozenset[str]
    source: str

    def check(self, announced: Sequence[TensorSpec]) -> None:
        """Raise ManifestError naming the first tensor that is missing, unexpected, or has another shape or dtype."""
        names = {spec.name for spec in announced}
        needed = [spec for spec in self.tensors if spec.name not in self.optional or spec.name in names]
        compare(needed, announced, accepts=accepts)

    @property
    def num_bytes(self) -> int:
        """Bytes of a full update in the checkpoint's own dtypes."""
        return sum(num_bytes(spec) for spec in self.tensors)


def expect(tensors: Sequence[TensorSpec], *, is_head_tied: bool, source: str) -> ExpectedTensors:
    """What a model of these tensors expects. A tied head may come or not, whether the list has it or not."""
    if not is_head_tied:
        return ExpectedTensors(tuple(tensors), frozenset(), source)
    listed = tuple(tensors)
    if all(spec.name != HEAD for spec in listed):
        embeddings = [spec for spec in listed if spec.name.endswith("embed_tokens.weight")]
        if len(embeddings) == 1:
            listed += (TensorSpec(name=HEAD, dtype=embeddings[0].dtype, shape=embeddings[0].shape),)
    return ExpectedTensors(listed, frozenset({HEAD}), source)


def describe(specs: Iterable[tuple[str, str, Sequence[int]]]) -> tuple[TensorSpec, ...]:
    """(name, dtype, shape) of a state dict as TensorSpecs; a dtype may carry torch's prefix."""
    return tuple(
        TensorSpec(name=name, dtype=dtype.removeprefix("torch."), shape=tuple(shape)) for name, dtype, shape in specs
    )
