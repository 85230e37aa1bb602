"""The torch engine with real processes, a real Gloo group and a real socket; what the contract suite doesn't ask."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("torch")

import torch

from rlbus.errors import ConfigError, EngineDeadError, EngineError, RLBusError
from rlbus.schemas import FaultCode, GroupPlan, PauseMode, RankSpan, ReceivedData, Version
from rlbus.transfer.source import weight_source
from rlbus.transfer.torch_plane import TorchPlane
from rlbus.workers.engines.base import ReceiveOrder, UpdateFailedError
from rlbus.workers.engines.torch_engine import TORN, TorchEngine
from rlbus.workers.torch_lm.make import make_tiny_model
from rlbus.workers.torch_lm.model import load_model
from rlbus.workers.torch_lm.sampling import Sampling

pytestmark = pytest.mark.integration

ONE = Version(step=1)
GREEDY = Sampling(max_tokens=8, temperature=0, ignores_eos=True)
BUCKET_BYTES = 1 << 16
# What is over in a moment, on a machine that is busy with other things.
LIMIT_S = 60.0


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two models, `a` and `b`."""
    folder = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("a", "b")):
        make_tiny_model(folder / name, seed=seed)
    return folder


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that stands still as its call is given up isn't killed so soon: that would make the engine a dead one."""
    monkeypatch.setattr("rlbus.workers.engines.torch_ranks.RELEASE_S", LIMIT_S)


class Fleet:
    """An engine and a trainer."""

    def __init__(self, engine: TorchEngine, plane: TorchPlane, models: Path) -> None:
        self.engine = engine
        self.plane = plane
        self.weights = load_model(models / "b").state_dict()
        self.specs = weight_source(self.weights).specs()

    async def join(self, epoch: int, timeout_s: float = LIMIT_S, with_sender: bool = True) -> GroupPlan:
        """Form a group."""
        num_ranks = self.engine.info.world_size
        span = RankSpan(component="backend", instance_id="1", first=1, num_ranks=num_ranks)
        plan = GroupPlan(
            epoch=epoch,
            group_id=f"g{epoch}",
            backend="gloo",
            num_trainer_ranks=1,
            world_size=1 + num_ranks,
            spans=(span,),
            rendezvous=await self.plane.rendezvous(),
            bucket_bytes=BUCKET_BYTES,
            timeout_s=timeout_s,
        )
        joins: list[Coroutine[Any, Any, object]] = [self.engine.join_group(plan, span)]
        if with_sender:
            joins.append(self.plane.join(plan))
        await asyncio.gather(*joins)
        return plan

    def receive(self, epoch: int) -> "tuple[asyncio.Task[ReceivedData], asyncio.Event]":
        """The receiving half, and when it stands."""
        loop, ready = asyncio.get_running_loop(), asyncio.Event()
        order = ReceiveOrder(f"op{epoch}", epoch, ONE, self.specs, BUCKET_BYTES)
        call = self.engine.receive_weights(
            order, lambda: (loop.call_soon_threadsafe(ready.set), None)[1], lambda done, total: None
        )
        return loop.create_task(call), ready

    async def send(self, epoch: int) -> None:
        """The sending half."""
        await self.plane.send(
            weight_source(self.weights),
            self.specs,
            bucket_bytes=BUCKET_BYTES,
            version=ONE,
            stream_id=f"op{epoch}",
            on_progress=lambda done, total: None,
        )

    async def tokens(self) -> tuple[int, ...]:
        """What the engine generates."""
        return (await self.engine.generate((5, 6, 7), GREEDY)).tokens


@asynccontextmanager
async def opened(models: Path, num_ranks: int) -> AsyncIterator[Fleet]:
    """Started, and closed within its bound with no process left."""
    engine, plane = TorchEngine(models / "a", num_ranks=num_ranks), TorchPlane("gloo")
    try:
        await engine.start()
        pids = engine.rank_pids
        assert len(pids) == num_ranks - 1
        yield Fleet(engine, plane, models)
    finally:
        async with asyncio.timeout(LIMIT_S):
            await plane.aclose()
            await engine.aclose()
            await engine.aclose()
    assert not any(is_running(pid) for pid in pids)


def is_running(pid: int) -> bool:
    """And not a zombie."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):  # the second: it ended between open and read
        return False


async def gone(pid: int) -> None:
    """Until a process that was killed has ended."""
    async with asyncio.timeout(LIMIT_S):
        while is_running(pid):  # noqa: ASYNC110 - it may be nobody's child
            await asyncio.sleep(0.02)


async def found_dead(engine: TorchEngine) -> None:
    """Until the engine says that it is dead."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            try:
                await engine.observe()
            except EngineDeadError:
                return
            await asyncio.sleep(0.01)


def run(models: Path, num_ranks: int, check: Callable[[Fleet], Coroutine[Any, Any, None]]) -> None:
    """One check on an engine of its own."""

    async def main() -> None:
        async with asyncio.timeout(240.0), opened(models, num_ranks) as fleet:
            await check(fleet)

    asyncio.run(main())


def test_every_rank_holds_what_the_trainer_sent(models: Path) -> None:
    """Three ranks; checksums of what they hold equal those of what was sent, and the labels tell the story."""

    async def check(fleet: Fleet) -> None:
        engine = fleet.engine
        assert (await engine.observe()).weight_version is None
        await engine.pause(PauseMode.KEEP, True)
        await fleet.join(1)
        receiving, ready = fleet.receive(1)
        await ready.wait()
        await fleet.send(1)
        received = await receiving
        assert (await engine.observe()).weight_version == TORN  # nobody has checked it yet
        await engine.finish_update(ONE)
        assert (await engine.observe()).weight_version == "0.1"
        sums = await engine.checksums()  # compares the ranks
        assert sums.algorithm == "rlbus"
        assert sums.sums == received.sums
        with pytest.raises(UpdateFailedError) as caught:
            await engine.finish_update(ONE)
        assert not caught.value.weights_touched

    run(models, 3, check)


def test_completions_are_served_on_the_real_port(models: Path) -> None:
    """SCENARIOS 10 and 25: by the engine's own server, which says which weights made the tokens."""

    async def check(fleet: Fleet) -> None:
        url = fleet.engine.info.completions_url
        assert url is not None
        assert url.startswith("http://127.0.0.1:")
        body = {"prompt": [5, 6, 7], "max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        async with httpx.AsyncClient(timeout=LIMIT_S, trust_env=False) as client:
            [choice] = (await client.post(f"{url}/v1/completions", json=body)).json()["choices"]
        assert tuple(choice["token_ids"]) == await fleet.tokens()
        port = int(url.rpartition(":")[2])
        second = TorchEngine(models / "a", port=port)
        with pytest.raises(ConfigError, match="can't listen"):
            await second.start()
        await second.aclose()

    run(models, 1, check)


def test_weights_that_run_or_lie_elsewhere_are_not_changed(models: Path, tmp_path: Path) -> None:
    """An update or reload of a running engine, a path outside of the roots, a folder that isn't complete."""
    make_tiny_model(tmp_path / "outside")
    (models / "link").unlink(missing_ok=True)
    (models / "link").symlink_to(tmp_path / "outside")
    other = make_tiny_model(models / "other-shape", hidden=32)
    cut = make_tiny_model(models / "cut", seed=9)
    data = (cut / "model.safetensors").read_bytes()
    (cut / "model.safetensors").write_bytes(data[:-100])

    async def check(fleet: Fleet) -> None:
        engine = fleet.engine
        before = await fleet.tokens()
        with pytest.raises(UpdateFailedError, match="isn't paused"):
            await engine.load_weights(str(models / "b"), ONE)
        await engine.pause(PauseMode.KEEP, True)
        for path, problem in (
            (tmp_path / "outside", "is not below"),
            (models / "link", "is not below"),
            (models / ".." / "elsewhere", "is not below"),
            (models / "none", "no such folder"),
            (other, "shape"),
            (cut, "no complete safetensors"),
        ):
            with pytest.raises(UpdateFailedError, match=problem) as caught:
                await engine.load_weights(str(path), ONE)
            assert not caught.value.weights_touched
        await engine.resume()
        assert await fleet.tokens() == before
        assert (await engine.observe()).weight_version is None
        await engine.pause(PauseMode.KEEP, True)
        await engine.load_weights(str(models / "b"), ONE)
        await engine.resume()
        assert await fleet.tokens() != before
        await engine.checksums()  # compares the ranks

    run(models, 2, check)


def test_sender_that_never_comes_ends_the_join_in_time(models: Path, patience: None) -> None:
    """SCENARIOS 23: bounded by the plan, naming who is missing; the next group can be formed."""

    async def check(fleet: Fleet) -> None:
        began = asyncio.get_running_loop().time()
        with pytest.raises(EngineError) as caught:
            await fleet.join(1, timeout_s=1.0, with_sender=False)
        assert caught.value.code is FaultCode.GROUP_FAILED
        assert "0" in caught.value.fault.message
        assert asyncio.get_running_loop().time() - began < LIMIT_S
        await fleet.join(2)

    run(models, 2, check)


def test_cancelled_join_leaves_no_group_behind(models: Path, patience: None) -> None:
    """At once, and the next one can be formed."""

    async def check(fleet: Fleet) -> None:
        joining = asyncio.ensure_future(fleet.join(1, timeout_s=4 * LIMIT_S, with_sender=False))
        await asyncio.sleep(0.2)
        joining.cancel()
        with pytest.raises(asyncio.CancelledError):
            async with asyncio.timeout(LIMIT_S):
                await joining
        await fleet.join(2)

    run(models, 2, check)


def test_rank_that_is_killed_makes_the_engine_dead(models: Path) -> None:
    """It says so when asked, and changes nothing any more."""

    async def check(fleet: Fleet) -> None:
        await fleet.engine.pause(PauseMode.KEEP, True)
        os.kill(fleet.engine.rank_pids[0], signal.SIGKILL)
        await found_dead(fleet.engine)
        for call in (
            fleet.engine.load_weights(str(models / "b"), ONE),
            fleet.engine.resume(),
        ):
            with pytest.raises(EngineDeadError):
                await call

    run(models, 2, check)


def test_rank_that_dies_in_a_transfer_ends_it_on_all(models: Path) -> None:
    """SCENARIOS 6: nobody waits for its time-out."""

    async def check(fleet: Fleet) -> None:
        await fleet.engine.pause(PauseMode.KEEP, True)
        await fleet.join(1, timeout_s=4 * LIMIT_S)
        receiving, ready = fleet.receive(1)
        await ready.wait()
        os.kill(fleet.engine.rank_pids[0], signal.SIGKILL)
        with pytest.raises(UpdateFailedError) as caught:
            async with asyncio.timeout(LIMIT_S):
                await receiving
        # The first rank hadn't got a byte, but nobody can ask the dead one.
        assert caught.value.weights_touched
        with pytest.raises(EngineDeadError):
            await fleet.engine.observe()

    run(models, 2, check)


def test_rank_that_hangs_is_killed_after_its_group_was_left(models: Path) -> None:
    """Stopped in the middle of a transfer: leaving frees the others, and the engine ends up dead rather than stuck."""

    async def check(fleet: Fleet) -> None:
        pid = fleet.engine.rank_pids[0]
        await fleet.engine.pause(PauseMode.KEEP, True)
        await fleet.join(1, timeout_s=4 * LIMIT_S)
        receiving, ready = fleet.receive(1)
        await ready.wait()
        os.kill(pid, signal.SIGSTOP)
        await fleet.engine.leave_group()
        with pytest.raises(UpdateFailedError):
            async with asyncio.timeout(LIMIT_S):
                await receiving
        await gone(pid)
        await found_dead(fleet.engine)

    run(models, 2, check)


def test_ranks_that_hold_different_weights_are_found_out(models: Path) -> None:
    """A checksum that they don't agree on is a fault that names the tensor."""

    async def check(fleet: Fleet) -> None:
        assert fleet.engine._rank is not None
        tensor: torch.Tensor = fleet.engine._rank._tensors["model.norm.weight"]
        tensor[0] += 1
        with pytest.raises(EngineError, match=r"rank 1 .*model\.norm\.weight") as caught:
            await fleet.engine.checksums()
        assert caught.value.code is FaultCode.CHECKSUM_MISMATCH

    run(models, 2, check)


def test_model_that_can_not_be_read_fails_the_start_and_leaves_nothing(models: Path, tmp_path: Path) -> None:
    """One clear error; the ranks that were started go."""

    async def main() -> None:
        engine = TorchEngine(tmp_path / "nothing", num_ranks=2)
        with pytest.raises(RLBusError, match="nothing"):
            await engine.start()
        pids = engine.rank_pids
        await engine.aclose()
        assert not any(is_running(pid) for pid in pids)

    asyncio.run(main())
    with pytest.raises(ConfigError, match="num_ranks"):
        TorchEngine(models / "a", num_ranks=0)


CODE = """
import asyncio, sys
from rlbus.workers.engines.torch_engine import TorchEngine
async def main():
    engine = TorchEngine(sys.argv[1], num_ranks=2)
    await engine.start()
    print(*engine.rank_pids, flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


def test_ranks_end_with_a_parent_that_is_killed(models: Path) -> None:
    """Even by SIGKILL."""
    parent = subprocess.Popen([sys.executable, "-c", CODE, str(models / "a")], stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None
        [pid] = map(int, parent.stdout.readline().split())
        assert is_running(pid)
        parent.kill()
        parent.wait()
        asyncio.run(gone(pid))
    finally:
        parent.kill()
        parent.wait()
        assert parent.stdout is not None
        parent.stdout.close()


def test_an_engine_that_listens_everywhere_announces_where_it_is_reached(models: Path) -> None:
    """Never the wildcard, which is none to connect to: without an address to announce it is refused."""

    async def main() -> None:
        engine = TorchEngine(models / "a", host="0.0.0.0", advertise_host="127.0.0.1")
        try:
            await engine.start()
            url = engine.info.completions_url
            assert url is not None
            assert url.startswith("http://127.0.0.1:")
            async with httpx.AsyncClient(timeout=LIMIT_S) as client:
                assert (await client.get(f"{url}/health")).status_code == 200
        finally:
            await engine.aclose()

    asyncio.run(main())
    with pytest.raises(ConfigError, match="wildcard"):
        TorchEngine(models / "a", host="0.0.0.0")
