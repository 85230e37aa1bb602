"""Whatever holds weights becomes a source that can be read again."""

from collections.abc import Iterator, Mapping

import pytest
import torch
from torch import Tensor, nn

from rlbus.errors import ConfigError
from rlbus.schemas import TensorSpec
from rlbus.transfer import source as sources
from rlbus.transfer.fake import FakeSource
from rlbus.transfer.source import weight_source

pytestmark = pytest.mark.unit


class Tied(nn.Module):
    """An embedding whose head is the same parameter, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 2)
        self.norm = nn.BatchNorm1d(2)
        self.head = nn.Linear(2, 4, bias=False)
        self.head.weight = self.embed.weight


NAMES = [
    "embed.weight",
    "norm.weight",
    "norm.bias",
    "norm.running_mean",
    "norm.running_var",
    "norm.num_batches_tracked",
]


def test_a_module_gives_parameters_and_buffers_with_tied_ones_once() -> None:
    """Under the first name, as checkpoints have them; all names when asked for."""
    module = Tied()
    source = weight_source(module)
    assert [spec.name for spec in source.specs()] == NAMES
    assert source.specs()[0] == TensorSpec(name="embed.weight", dtype="float32", shape=(4, 2))
    assert source.specs()[-1] == TensorSpec(name="norm.num_batches_tracked", dtype="int64", shape=())
    both = weight_source(module, keep_tied=True)
    assert [spec.name for spec in both.specs()] == [*NAMES, "head.weight"]


def test_every_reading_sees_the_weights_of_now_without_a_copy() -> None:
    """A step of the optimiser between two updates is seen, also when parameters were replaced."""
    module = Tied()
    source = weight_source(module)
    with torch.no_grad():
        module.embed.weight.fill_(7.0)
    name, tensor = next(iter(source))
    assert name == "embed.weight"
    assert tensor.data_ptr() == module.embed.weight.data_ptr()
    assert not tensor.requires_grad
    module.embed.weight = nn.Parameter(torch.zeros(3, 2))
    assert [spec.shape for spec in source.specs()][:1] == [(3, 2)]


def test_a_mapping_and_pairs_are_read_as_often_as_needed() -> None:
    """A state dict and a list of pairs give the same, twice."""
    first = torch.arange(3)
    weights = {"a": first, "b": first[1:], "c": first.view(torch.float64)}
    for source in (weight_source(weights), weight_source(list(weights.items()))):
        for _ in range(2):
            assert [(name, t.data_ptr()) for name, t in source] == [(n, t.data_ptr()) for n, t in weights.items()]
        assert [spec.shape for spec in source.specs()] == [(3,), (2,), (3,)]


class Cast(Mapping[str, Tensor]):
    """A state dict that is cast as it is read: each tensor is gone when the next but one is made."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self._weights = weights

    def __len__(self) -> int:
        return len(self._weights)

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __getitem__(self, name: str) -> Tensor:
        return self._weights[name].to(torch.bfloat16)


def test_tensors_that_are_made_as_they_are_read_are_never_taken_for_tied() -> None:
    """Whose memory is that of one before; announced and sent alike, whatever the reader holds on to."""
    weights = {f"layer{i}.{kind}": torch.full((64, 64), float(i)) for i in range(8) for kind in ("q", "k")}
    source = weight_source(Cast(weights))
    assert [spec.name for spec in source.specs()] == list(weights)
    assert [name for name, _ in source] == list(weights)
    assert [name for name, _ in list(source)] == list(weights)


class Cached(Cast):
    """One whose casts stay, and are looked at anew at every reading: embedding and head are one."""

    def __init__(self) -> None:
        one, norm = torch.ones(4, 4, dtype=torch.bfloat16), torch.ones(4, dtype=torch.bfloat16)
        super().__init__({"embed": one, "norm": norm, "head": one})

    def __getitem__(self, name: str) -> Tensor:
        return super().__getitem__(name).view(-1)


def test_new_views_of_one_storage_that_stays_are_tied() -> None:
    """The tensors are made as they are read, what they show is not."""
    cached = weight_source(Cached())
    assert [spec.name for spec in cached.specs()] == ["embed", "norm"]
    assert [name for name, _ in cached] == ["embed", "norm"]


def test_ranks_whose_shard_is_empty_find_the_same_ties(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 50,257 rows on 512 ranks the last four have none; each name is a collective that all have to join."""
    monkeypatch.setattr(sources, "_local", lambda tensor: tensor[:0])
    head = torch.ones(4, 2)
    weights = {"embed": head, "norm": torch.ones(2), "head": head}
    assert [spec.name for spec in weight_source(weights).specs()] == ["embed", "norm"]


def test_views_of_one_memory_that_mean_other_numbers_are_not_tied() -> None:
    """Conjugated, an imaginary part is the same memory with the other sign."""
    values = torch.ones(3, dtype=torch.complex64) * 1j
    weights = {"a": values.imag, "b": values.conj().imag}
    assert [name for name, _ in weight_source(weights)] == ["a", "b"]


def test_empty_tensors_are_never_taken_for_tied() -> None:
    """They have no memory to share."""
    assert [s.name for s in weight_source({"a": torch.empty(0), "b": torch.empty(0)}).specs()] == ["a", "b"]


def test_a_source_passes_unchanged() -> None:
    """Also when torch has nothing to do with it."""
    source = FakeSource([TensorSpec(name="a", dtype="int8", shape=())])
    assert weight_source(source) is source


def _generator() -> Iterator[tuple[str, Tensor]]:
    yield "a", torch.zeros(1)


@pytest.mark.parametrize(
    ("weights", "problem"),
    [
        (_generator(), "read once only"),
        (nn.Linear(1, 1).named_parameters(), "read once only"),
        (3, "give a module, a state dict"),
        ({"a": 1.5}, "weights='a': is a float"),
        ({1: torch.zeros(1)}, "weights='1': names of tensors are text"),
        ({"a": torch.zeros(1, device="meta")}, "weights='a': is on the meta device"),
        ({"a": torch.zeros(2, 2).to_sparse()}, "weights='a': has layout"),
    ],
)
def test_what_can_not_be_sent_is_refused_by_name(weights: object, problem: str) -> None:
    """With what to give instead."""
    with pytest.raises(ConfigError, match=problem):
        weight_source(weights).specs()
