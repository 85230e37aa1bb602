"""Folders that a shared disk may never give back."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from rlbus.adapter import AdapterError, adapter_sum
from rlbus.controller.http import summing
from rlbus.controller.http.loras import CHECKSUM_HEADER
from rlbus.controller.http.summing import Summing
from rlbus.errors import BusyError, DeadlineError
from rlbus.testing import run
from tests.unit.controller.http.side import code_of, over_http
from tests.unit.controller.lora_stage import adapter, takers
from tests.unit.controller.scene import Scene
from tests.unit.hung_disk import LEFT_S, HungDisk

pytestmark = pytest.mark.unit

# For how long a hanging thread is waited for, in real seconds.
LIMIT_S = 0.05


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The controller's view of the folders."""
    made = HungDisk()
    monkeypatch.setattr(summing, "adapter_sum", made.read)
    yield made
    made.heal()


def with_sums(scenario: Callable[[Summing], Any]) -> None:
    async def main() -> None:
        await scenario(Summing("send it"))

    run(main())


def test_a_folder_that_hangs_costs_one_thread_that_nobody_else_needs(tmp_path: Path, disk: HungDisk) -> None:
    """Not one of the loop's, which its end waits for; another folder is read, and this one once the disk is well."""
    hung, well = adapter(tmp_path / "hung"), adapter(tmp_path / "well", "2")

    async def scenario(sums: Summing) -> None:
        with pytest.raises(DeadlineError, match="hung"):
            await sums.sum_of(hung, LIMIT_S)
        for _ in range(40):
            with pytest.raises(BusyError, match="hung is being read"):
                await sums.sum_of(hung, LIMIT_S)
        assert [thread.daemon for thread in disk.threads] == [True]
        assert await sums.sum_of(well, LEFT_S) == adapter_sum(well).checksum
        disk.heal()
        assert await sums.sum_of(hung, LEFT_S) == adapter_sum(hung).checksum

    with_sums(scenario)


def test_a_disk_whose_every_folder_hangs_keeps_few_threads(
    tmp_path: Path, disk: HungDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that names a new folder each step must not use them up."""
    monkeypatch.setattr(summing, "MAX_READING", 2)

    async def scenario(sums: Summing) -> None:
        folders = [adapter(tmp_path / f"hung_{n}") for n in range(3)]
        for folder in folders[:2]:
            with pytest.raises(DeadlineError):
                await sums.sum_of(folder, LIMIT_S)
        with pytest.raises(BusyError, match="2 folders"):
            await sums.sum_of(folders[2], LIMIT_S)
        assert len(disk.threads) == 2

    with_sums(scenario)


def test_a_folder_that_is_not_there_is_named_and_can_be_asked_for_again(tmp_path: Path) -> None:
    """It may come."""

    async def scenario(sums: Summing) -> None:
        with pytest.raises(AdapterError, match="send it"):
            await sums.sum_of(tmp_path / "late", LEFT_S)
        folder = adapter(tmp_path / "late")
        assert await sums.sum_of(folder, LEFT_S) == adapter_sum(folder).checksum

    with_sums(scenario)


@pytest.mark.parametrize("path", ["/" + "x" * 300, "/" + "x/" * 3000])
def test_a_path_that_can_not_be_looked_at_is_as_one_that_is_not_there(path: str) -> None:
    """With the reason, and what to do about it; by any of the routes."""

    async def check(client: httpx.AsyncClient, scene: Scene) -> None:
        for route in ("/load_lora_adapter", "/v1/load_lora_adapter"):
            answer = await client.post(route, json={"lora_name": "policy", "lora_path": path})
            status, message = code_of(answer)
            assert (status, "name too long" in message.lower()) == (404, True)
            assert CHECKSUM_HEADER in message

    over_http(takers(1), check)


def test_a_folder_that_may_not_be_read_is_as_one_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The workers may see it, as other users."""
    folder = adapter(tmp_path / "secret")

    def refuse(path: Path, *_: Any, **__: Any) -> Any:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    async def scenario(sums: Summing) -> None:
        for of, name in ((Path, "is_file"), (os, "open")):  # the folder, or a file in it
            with monkeypatch.context() as patched:
                patched.setattr(of, name, refuse)
                for _ in range(2):  # nor is it taken for one that is still being read
                    with pytest.raises(AdapterError, match=r"adapter_config.json: Permission denied; send it"):
                        await sums.sum_of(folder, LEFT_S)

    with_sums(scenario)


def test_who_asks_for_a_folder_that_hangs_is_told_to_come_later(tmp_path: Path, disk: HungDisk) -> None:
    """By each route's own status; the fleet is asked nothing."""
    folder = adapter(tmp_path / "hung")

    async def check(client: httpx.AsyncClient, scene: Scene) -> None:
        body = {"lora_name": "policy", "lora_path": str(folder)}
        limit = {"x-rlbus-limit-s": str(LIMIT_S)}
        paths = ("/load_lora_adapter", "/load_lora_adapter", "/v1/load_lora_adapter")
        answers = [await client.post(path, json=body, headers=limit) for path in paths]
        assert [code_of(answer)[0] for answer in answers] == [500, 500, 503]
        assert [answer.headers["retry-after"] for answer in answers] == ["1"] * 3
        assert scene.commands == []
        disk.heal()
        assert (await client.post("/load_lora_adapter", json=body)).status_code == 200

    over_http(takers(1, roots=[tmp_path]), check)
