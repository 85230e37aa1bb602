"""Adapters' folders on a disk that hangs: whoever loads another one hardly waits, and is told what is wrong."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlbus.workers.engines.fake import FakeEngine
from rlbus.workers.engines.lora import LoraInfo
from rlbus.workers.lora_testing import config_for, fake_adapter
from rlbus.workers.system import dynamo_loras, summing
from rlbus.workers.system.testing import Front, on_surface
from tests.unit.hung_disk import HungDisk

pytestmark = pytest.mark.unit

# For how long a hanging thread is waited for, in real seconds.
SOON_S = "0.05"


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[HungDisk]:
    """What the surface sees of the folders."""
    made = HungDisk()
    monkeypatch.setattr(dynamo_loras, "adapter_sum", made.read)
    monkeypatch.setattr(summing, "TURN_S", 0.05)
    yield made
    made.heal()


async def load(front: Front, name: str, folder: Path, **headers: str) -> tuple[int, str]:
    """Status, and what is said."""
    body = {"lora_name": name, "source": {"uri": folder.as_uri()}}
    answer = await front.post("/engine/load_lora", body, **headers)
    return answer.status_code, answer.json()["message"]


def play(tmp_path: Path, scenario: Any) -> None:
    on_surface(scenario, engine=FakeEngine(loras=LoraInfo(8)), config=config_for(tmp_path))


def test_a_folder_that_hangs_keeps_no_other_load(tmp_path: Path, disk: HungDisk) -> None:
    """It costs one thread; whoever asks for it meanwhile is told at once, and gets it once the disk is well."""
    hung, well = fake_adapter(tmp_path / "hung", "x"), fake_adapter(tmp_path / "well", "y")

    async def scenario(front: Front) -> None:
        assert "took longer than 0.05 s" in (await load(front, "a", hung, x_rlbus_limit_s=SOON_S))[1]
        assert "loaded successfully as b@1" in (await load(front, "b", well))[1]
        for _ in range(20):
            status, text = await load(front, "a", hung)
            assert (status, "still being read for another request; try again" in text) == (503, True)
        asked = {"lora_name": "a", "lora_path": str(hung)}
        assert (await front.post("/v1/load_lora_adapter", asked)).headers["retry-after"]
        assert [thread.daemon for thread in disk.threads] == [True]
        disk.heal()
        assert "loaded successfully as a@1" in (await load(front, "a", hung))[1]

    play(tmp_path, scenario)


def test_folders_that_hang_take_no_more_than_so_many_threads(
    tmp_path: Path, disk: HungDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They can't be ended."""
    monkeypatch.setattr(summing, "MAX_READING", 3)

    async def scenario(front: Front) -> None:
        for number in range(3):
            await load(front, "a", fake_adapter(tmp_path / f"hung{number}", "x"), x_rlbus_limit_s=SOON_S)
        status, text = await load(front, "a", fake_adapter(tmp_path / "hung4", "x"))
        assert (status, "3 folders are" in text) == (503, True)
        assert len(disk.threads) == 3

    play(tmp_path, scenario)
