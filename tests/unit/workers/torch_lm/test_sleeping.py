"""Weights and KV that give their memory back, and what is left of them."""

from pathlib import Path

import pytest
import torch

from rlbus.workers.torch_lm.kv import KVPool
from rlbus.workers.torch_lm.make import make_tiny_model
from rlbus.workers.torch_lm.model import load_model
from rlbus.workers.torch_lm.rank import Rank
from rlbus.workers.torch_lm.sleeping import SleepingTensors

pytestmark = pytest.mark.unit


def mapped(tensors: dict[str, torch.Tensor]) -> int:
    return sum(t.untyped_storage().nbytes() for t in tensors.values())


def rss_bytes() -> int:
    """What this process has in memory, by the system's count."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_the_memory_goes_back_to_the_system_and_the_weights_are_what_they_were() -> None:
    """64 MiB by the system's own count, not only by torch's."""
    tensors = {"w": torch.randn(4096, 4096), "b": torch.randn(7)}
    before = {name: tensor.clone() for name, tensor in tensors.items() if name == "b"}
    total = float(tensors["w"].double().sum())
    sleeping = SleepingTensors(tensors)
    awake_bytes = rss_bytes()
    assert sleeping.sleep(keeps=True) == sleeping.num_bytes == (4096 * 4096 + 7) * 4
    assert mapped(tensors) == 0
    assert rss_bytes() < awake_bytes - (48 << 20)
    assert sleeping.sleep(keeps=True) == 0
    assert sleeping.wake() == sleeping.num_bytes
    assert sleeping.wake() == 0
    assert float(tensors["w"].double().sum()) == total
    assert torch.equal(tensors["b"], before["b"])


def test_discarded_weights_are_no_numbers() -> None:
    """Whoever generates on them sees it."""
    tensors = {"w": torch.randn(8, 8)}
    sleeping = SleepingTensors(tensors)
    sleeping.sleep(keeps=False)
    sleeping.wake()
    assert torch.isnan(tensors["w"]).all()


def test_a_file_that_can_not_be_written_frees_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk costs the sleep, not the weights."""

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    tensors = {"w": torch.ones(8, 8)}
    sleeping = SleepingTensors(tensors)
    with monkeypatch.context() as patch:
        patch.setattr("tempfile.TemporaryFile", full)
        with pytest.raises(OSError, match="No space"):
            sleeping.sleep(keeps=True)
    assert torch.equal(tensors["w"], torch.ones(8, 8))


def test_a_wake_that_fails_can_be_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is lost by it, and nothing is mapped half."""
    tensors = {"w": torch.ones(8, 8)}
    sleeping = SleepingTensors(tensors)
    sleeping.sleep(keeps=True)
    fill = sleeping._fill

    def short() -> None:
        raise OSError("the file ends")

    monkeypatch.setattr(sleeping, "_fill", short)
    with pytest.raises(OSError, match="ends"):
        sleeping.wake()
    assert mapped(tensors) == 0
    monkeypatch.setattr(sleeping, "_fill", fill)
    sleeping.wake()
    assert torch.equal(tensors["w"], torch.ones(8, 8))


def test_a_rank_sleeps_with_the_tensors_of_its_model(tmp_path: Path) -> None:
    """The model that generates is the one that slept."""
    model = load_model(make_tiny_model(tmp_path / "model"))
    rank = Rank(model)
    before = rank.checksums()
    with torch.no_grad():
        logits = model(torch.tensor([[1, 2, 3]]))
    assert rank.sleep(keeps=True) > 0
    rank.wake()
    assert rank.checksums() == before
    with torch.no_grad():
        assert torch.equal(model(torch.tensor([[1, 2, 3]])), logits)
    rank.sleep(keeps=True)
    rank.forget()


def test_the_pool_keeps_its_slots_and_loses_what_they_held() -> None:
    """Of zeros afterwards; both idempotent."""
    pool = KVPool(1, 2, 4, 8, 16, like=torch.zeros(1))
    slot = pool.take()
    pool.write(slot, 0, torch.ones(1, 2, 2, 4, 4))
    num_bytes = pool.release()
    assert num_bytes > 0
    assert pool.release() == 0
    assert pool.restore() == num_bytes
    assert pool.restore() == 0
    assert float(pool.read(slot, 0, 4).sum()) == 0.0
    assert pool.take() != slot
