"""A real Dynamo fleet on the bus: adopted by one command, paused, updated, resumed; a worker that dies comes back."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file

import rlbus
from rlbus.server import EmbeddedServer
from rlbus.workers.supervisor.processes import tree
from rlbus.workers.torch_lm.make import make_tiny_model
from tests.peers.dynamo import MAX_TOKENS, Dynamo, dynamo
from tests.peers.fleet import COMMAND_S
from tests.peers.programs import START_S, Program, Programs, clean_env

# A worker takes 20 s to start, and minutes on a machine under load; there are two.
LIMIT_S = 900.0
GLOO = ("--weight-transfer-config", json.dumps({"backend": "gloo"}))
NUM_TOKENS = 12
PROMPT = (5, 6, 7, 8)
pytestmark = [pytest.mark.peers, pytest.mark.timeout(LIMIT_S)]


@dataclass
class Stage:
    """Dynamo, and rlbus beside it."""

    fleet: Dynamo
    programs: Programs
    env: dict[str, str]
    sidecar: Program

    async def rlbus(self, *arguments: str, code: int | None = 0) -> dict[str, Any]:
        """Run a command with --json; its document."""
        argv = [sys.executable, "-m", "rlbus", *arguments, "--deadline", str(COMMAND_S), "--json"]
        done = await asyncio.to_thread(
            subprocess.run, argv, env=self.env, capture_output=True, text=True, timeout=2 * COMMAND_S, check=False
        )
        assert code is None or done.returncode == code, f"{arguments}: {done.stdout}{done.stderr}"
        found: dict[str, Any] = json.loads(done.stdout or "{}")
        return found

    async def members(self) -> dict[str, dict[str, Any]]:
        """The live workers of the bus by name."""
        status = await self.rlbus("workers", code=None)
        return {one["worker"]: one for one in status.get("workers", ()) if one["liveness"] == "alive"}

    async def until(self, is_true: Callable[[dict[str, dict[str, Any]]], bool]) -> dict[str, dict[str, Any]]:
        """Look at the members until it is; they."""
        while True:
            members = await self.members()
            if is_true(members):
                return members
            assert self.sidecar.is_running, self.sidecar.tail()
            await asyncio.sleep(0.5)

    async def until_admitted(self, name: str) -> dict[str, Any]:
        """Wait until a worker may be sent rollouts; what is said of it then."""
        return (await self.until(lambda members: name in members and members[name]["admitted"]))[name]

    async def tokens(self) -> list[int]:
        """What Dynamo's front end generates."""
        return await asyncio.to_thread(self.fleet.tokens, NUM_TOKENS, PROMPT)


@asynccontextmanager
async def stage(folder: Path, programs: Programs, *, is_shared: bool) -> AsyncIterator[Stage]:
    """Dynamo without workers, a controller, and the sidecar, which has nobody to adopt yet; `is_shared`: on Dynamo's
    own NATS server.
    """
    async with dynamo(folder, programs) as fleet, EmbeddedServer() as server:
        env = clean_env(
            RLBUS_URL=fleet.nats_url if is_shared else server.url,
            XDG_STATE_HOME=str(folder / "state"),
            CUDA_VISIBLE_DEVICES="",
        )
        env["PYTHONPATH"] = os.environ.get("PYTHONPATH", "")
        rlbus_argv = [sys.executable, "-m", "rlbus"]
        # Without a lease, which it would lose when it stands still for 2 s.
        programs.start("controller", [*rlbus_argv, "controller", "--single"], env)
        adopt = ("worker", "dynamo", "--discovery", fleet.rl_url, "--weight-root", str(folder))
        sidecar = programs.start("sidecar", [*rlbus_argv, *adopt], env)
        yield Stage(fleet, programs, env, sidecar)


def play(folder: Path, act: Callable[[Stage], Coroutine[Any, Any, None]], *, is_shared: bool) -> None:
    """Run a scene; what the programs said last is shown when it fails."""

    async def scene() -> None:
        programs = Programs(folder)
        try:
            async with stage(folder, programs, is_shared=is_shared) as on:
                await act(on)
        except BaseException:
            sys.stderr.write("\n".join(program.tail() for program in programs.running))
            raise
        finally:
            await asyncio.to_thread(programs.close)

    asyncio.run(scene())


def expected_tokens(folder: Path) -> list[int]:
    """What Hugging Face's model of that folder generates greedily."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = list(PROMPT)
    with torch.no_grad():
        for _ in range(NUM_TOKENS):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(PROMPT) :]


async def start(on: Stage, port: int | None = None) -> tuple[Program, str, str]:
    """A worker that Dynamo lists, and the sidecar has adopted: its program, URL, and name on the bus."""
    worker, url = on.fleet.start_worker(*GLOO, port=port)
    instance_id = await asyncio.to_thread(on.fleet.until_listed, worker, url)
    name = f"backend/{instance_id}"
    await on.until(lambda members: name in members)
    return worker, url, name


def test_a_dynamo_fleet_is_adopted_paused_updated_and_resumed_by_one_command_each(tmp_path: Path) -> None:
    """What Dynamo's front end generates is what the new weights generate; versions agree; the id isn't rounded."""
    weights = make_tiny_model(tmp_path / "one", seed=1, max_positions=MAX_TOKENS)
    others = make_tiny_model(tmp_path / "two", seed=2, max_positions=MAX_TOKENS)

    async def act(on: Stage) -> None:
        _, url, name = await start(on)
        member = await on.until_admitted(name)
        assert member["descriptor"]["engine"] == "dynamo"
        assert member["descriptor"]["backends"] == ["gloo"]
        await holds_while_paused(on)
        await on.rlbus("update", "--from", str(weights), "--version", "1")
        assert await on.tokens() == expected_tokens(weights)
        member = await on.until_admitted(name)
        assert member["status"]["weights"]["version"] == [0, 1]
        assert member["status"]["drift"] is None
        await trains(on, others)
        await shows_drift(on, url, name)

    async def holds_while_paused(on: Stage) -> None:
        """A request that comes during a pause waits for its end."""
        before = await on.tokens()
        await on.rlbus("pause")
        late = asyncio.create_task(on.tokens())
        await asyncio.sleep(1.0)
        assert not late.done()
        await on.rlbus("resume")
        assert await late == before

    async def trains(on: Stage, folder: Path) -> None:
        """A trainer's update over a group, with checksums of what arrived."""

        def update() -> Any:
            with rlbus.Trainer(on.env["RLBUS_URL"]) as trainer:
                return trainer.update_weights(load_file(folder / "model.safetensors"), version=2, on_failure="stop")

        report = await asyncio.to_thread(update)
        assert report.version.step == 2
        assert await on.tokens() == expected_tokens(folder)

    async def shows_drift(on: Stage, url: str, name: str) -> None:
        """Who pauses Dynamo behind our back is seen."""
        async with httpx.AsyncClient(trust_env=False, timeout=START_S) as http:
            await http.post(f"{url}/engine/pause_generation", json={"mode": "keep"})
            members = await on.until(lambda found: name in found and found[name]["status"]["drift"] is not None)
            assert members[name]["status"]["drift"] == "commanded to run, but the engine is paused"
            assert not members[name]["admitted"]
            await http.post(f"{url}/engine/resume_generation", json={})
        assert (await on.until_admitted(name))["status"]["drift"] is None

    play(tmp_path, act, is_shared=False)


def test_a_dead_worker_leaves_and_its_successor_is_not_admitted_before_an_update(tmp_path: Path) -> None:
    """SCENARIOS 8, 25: same URL, new process, new id. And a sidecar that is killed and started again finds its worker
    as it left it. All of it on Dynamo's own NATS server.
    """
    weights = make_tiny_model(tmp_path / "one", seed=1, max_positions=MAX_TOKENS)

    async def act(on: Stage) -> None:
        worker, url, name = await start(on)
        await on.rlbus("update", "--from", str(weights), "--version", "1")
        await survives_its_sidecar(on, name)
        worker.kill()
        await on.until(lambda members: name not in members)
        port = int(url.rpartition(":")[2])
        _, _, successor = await start(on, port)
        assert successor != name
        member = (await on.until(lambda members: successor in members))[successor]
        assert not member["admitted"]
        assert member["status"]["weights"]["version"] is None
        await on.rlbus("update", "--from", str(weights), "--version", "2")
        await on.until_admitted(successor)
        assert await on.tokens() == expected_tokens(weights)
        on.sidecar.signal(signal.SIGTERM)
        await bye(on, successor)

    async def survives_its_sidecar(on: Stage, name: str) -> None:
        """Killed alone, it is started again by its supervisor."""
        before = await on.until_admitted(name)
        (pid,) = {process.pid for process in tree(on.sidecar.pid)[1:]}
        os.kill(pid, signal.SIGKILL)
        after = await on.until(lambda members: name in members and members[name]["boot_id"] != before["boot_id"])
        assert after[name]["status"]["weights"] == before["status"]["weights"]

    async def bye(on: Stage, name: str) -> None:
        await asyncio.to_thread(on.sidecar.wait)
        assert "the sidecar stops" in on.sidecar.log.read_text()
        while name in await on.members():  # noqa: ASYNC110 - other processes have no Event
            await asyncio.sleep(0.2)

    play(tmp_path, act, is_shared=True)
