"""The fleet that is struck: a real NATS server, a controller and its standby, workers, and a trainer, each a process.

It stands over many cases. Before each one `whole` makes it whole again, in the ordinary way: what isn't there is
started, and one update brings everybody to one version.
"""

import asyncio
import contextlib
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from rlbus._process import Child
from rlbus.bus import Bus
from rlbus.client import FleetClient
from rlbus.codec import decode
from rlbus.config import BusConfig
from rlbus.connecting import connect_bus, open_kv
from rlbus.controller.journal import OPS
from rlbus.controller.leader import LEASE_KEY
from rlbus.errors import BrokenError, DeadlineError
from rlbus.schemas import FleetView, JournalEntry, Lease, MemberView
from rlbus.server import EmbeddedServer
from tests.chaos.brake import Brake
from tests.chaos.cases import STALL_S
from tests.chaos.controller import FOLDER_VARIABLE
from tests.chaos.kits import Kit
from tests.chaos.messages import Ended, News, Tokens, Up, Update
from tests.chaos.probing import wrong_outputs
from tests.chaos.processes import TrainerProcess, descendants, engine_pid, is_running, serving_pid, start, strike
from tests.chaos.promises import OpEnd
from tests.chaos.watching import UPDATE

NAMESPACE = "chaos"
NUM_CONTROLLERS = 2
# One call of update_weights; the longest outage is 20 s.
UPDATE_S = 60.0
# Starting a controller or a trainer (which imports torch), on a loaded machine.
START_S = 120.0
# How many undisturbed updates may be needed before everybody is in step.
HEAL_TRIES = 3
LOOK_S = 0.1
# After so many blows a worker gets a new supervisor, which doesn't back off yet.
MAX_BLOWS = 2


class Stage:
    """Use as `async with`. `trainer` is the one that calls now; `version` the newest that was asked for."""

    def __init__(self, kit: Kit) -> None:
        self.kit = kit
        self.version = 0
        # What the trainers' own models generate, by version.
        self.tokens: dict[int, tuple[int, ...]] = {}
        self.on_news: Callable[[News], None] = lambda news: None
        # What happened in the last case, for whoever looks into it.
        self.trace = ""
        # How long workers took from the start of their process to the bus, the last time that all were started.
        self.worker_start_s = 0.0
        self.trainer_start_s = 0.0
        self._stack = contextlib.AsyncExitStack()
        self._workers: dict[str, Child] = {}
        self._num_blows: Counter[str] = Counter()
        self._controllers: list[Child] = []
        self._trainers: list[TrainerProcess] = []

    async def __aenter__(self) -> "Stage":
        try:
            await self._set()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await asyncio.gather(*(trainer.stop() for trainer in self._trainers))
        for child in (*self._controllers, *self._workers.values()):
            for pid in descendants(child.pid):
                strike(pid, signal.SIGCONT)
        await asyncio.gather(*(child.stop(1.0) for child in (*self._controllers, *self._workers.values())))
        await self._stack.aclose()

    async def _set(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="rlbus-chaos-"))
        self._stack.callback(shutil.rmtree, self.folder, ignore_errors=True)
        self.brake = Brake(self.folder)
        self.model = self.folder / "model"
        await asyncio.to_thread(self.kit.make_model, self.model)
        self.server = await self._stack.enter_async_context(EmbeddedServer(store_dir=self.folder / "nats"))
        self.bus: Bus = await self._stack.enter_async_context(
            await connect_bus(BusConfig(url=self.server.url), name="chaos")
        )
        self.client = FleetClient(self.bus, NAMESPACE, caller="chaos")
        self._kv = await open_kv(self.bus, NAMESPACE)
        await self.start_missing()

    @property
    def _env(self) -> dict[str, str]:
        return {"RLBUS_URL": self.server.url, "RLBUS_NAMESPACE": NAMESPACE}

    @property
    def trainer(self) -> TrainerProcess:
        """The newest one."""
        return self._trainers[-1]

    # -- starting -----------------------------------------------------------------------------------------------------

    async def start_missing(self) -> None:
        """Start whatever isn't there, and wait until it is. Raises: DeadlineError."""
        began_s = time.monotonic()
        while sum(is_running(child.pid) for child in self._controllers) < NUM_CONTROLLERS:
            await self.start_controller()
        missing = [worker for worker in self.kit.workers if not self.is_started(worker)]
        for worker in missing:
            await self.start_worker(worker)
        if not self._trainers or not self.trainer.is_alive:
            await self.start_trainer()
        await self.client.wait_ready(num_workers=len(self.kit.workers), deadline_s=self.kit.ready_s)
        if len(missing) == len(self.kit.workers):
            self.worker_start_s = time.monotonic() - began_s

    async def start_controller(self) -> None:
        """One more; it stands by if another leads."""
        env = {**self._env, FOLDER_VARIABLE: str(self.folder)}
        self._controllers.append(await start("controller", ("tests.chaos.controller",), env, self.folder))

    async def start_worker(self, worker: str) -> None:
        """Start a worker that isn't there, under its id."""
        instance_id = worker.partition("/")[2]
        argv = ["rlbus", "worker", self.kit.name, str(self.model), "--instance-id", instance_id]
        argv += self.kit.options[instance_id]
        name = f"worker-{instance_id}"
        self._workers[worker] = await start(name, argv, {**self._env, **self.kit.env}, self.folder)

    async def start_trainer(self) -> None:
        """A new one; it is the trainer from now on. Raises: DeadlineError, BrokenError."""
        began_s = time.monotonic()
        argv = ["--url", self.server.url, "--namespace", NAMESPACE, "--model", str(self.model)]
        argv += ["--policy", self.kit.policy]
        log = self.folder / "trainer.log"
        self._trainers.append(await TrainerProcess.start(argv, {"OMP_NUM_THREADS": "1"}, log, self._on_news))
        await self.trainer.expect(Up, START_S)
        self.trainer_start_s = time.monotonic() - began_s

    def is_started(self, worker: str) -> bool:
        """Whether the process that the harness started for it lives: the worker itself, or what supervises it."""
        child = self._workers.get(worker)
        return child is not None and is_running(child.pid)

    # -- whom to strike -----------------------------------------------------------------------------------------------

    def next_worker(self) -> str:
        """Whom to strike: the one that was struck least, since restarts of the same one back off more and more."""
        return min(self.kit.struck_workers, key=lambda worker: self._num_blows[worker])

    def count_blow(self, worker: str) -> None:
        """It, or its engine, is struck now."""
        self._num_blows[worker] += 1

    async def leader(self) -> int:
        """Process id of the controller that leads, by its lease. Raises: BrokenError: nobody does."""
        entry = await self._kv.get(LEASE_KEY)
        if entry is None:
            raise BrokenError("controller", "nobody holds the lease")
        lease: Lease = decode(entry.value, Lease, LEASE_KEY)
        return int(lease.name.rpartition("/")[2])

    async def view(self) -> FleetView:
        """The controller's word."""
        return await self.client.status()

    def pid_of(self, member: MemberView) -> int | None:
        """The process of a worker that serves; None: nobody does."""
        url = member.descriptor.completions_url
        port = None if url is None else urlsplit(url).port
        child = self._workers.get(member.worker)
        return None if port is None or child is None else serving_pid(child.pid, port)

    def engine_of(self, worker: str) -> int | None:
        """The process of its engine beside the one that serves."""
        return engine_pid(self._workers[worker].pid, self.kit.engine_words)

    async def standing(self) -> dict[str, tuple[int | None, str]]:
        """Serving process and boot of every worker that is alive."""
        view = await self.view()
        return {m.worker: (self.pid_of(m), m.boot_id) for m in view.members if m.liveness.value == "alive"}

    # -- updating -----------------------------------------------------------------------------------------------------

    def begin_update(self, *, hold: bool = False) -> int:
        """Tell the trainer to give the fleet the next version; which one."""
        self.version += 1
        self.trainer.order(Update(version=self.version, hold=hold, deadline_s=UPDATE_S, stall_s=STALL_S))
        return self.version

    async def whole(self) -> float:
        """Make the fleet whole; how long an undisturbed update took, in seconds. Raises: BrokenError: it can't be."""
        await self._renew_struck()
        await self.start_missing()
        end: Ended | None = None
        for _ in range(HEAL_TRIES):
            version = self.begin_update()
            end = await self.trainer.ended(version, UPDATE_S)
            if end is None:
                await self.start_trainer()
            elif end.status == "ok" and await self._is_whole(version):
                return end.took_s
        raise BrokenError("the fleet", f"isn't whole after {HEAL_TRIES} updates; the last one: {end}")

    async def _renew_struck(self) -> None:
        """A supervisor waits longer and longer before it starts again what dies often, and gives up in the end."""
        for worker, num in self._num_blows.items():
            if num >= MAX_BLOWS:
                await self._workers[worker].stop()
                self._num_blows[worker] = 0

    async def reset(self) -> None:
        """Start everything anew but the server, unless that is gone, after a case that left it beyond healing."""
        await asyncio.gather(*(trainer.stop() for trainer in self._trainers))
        for child in (*self._workers.values(), *self._controllers):
            await child.stop(0.0)
        self._trainers, self._workers, self._controllers = [], {}, []
        await self.server.start()
        await self.start_missing()

    async def _is_whole(self, version: int) -> bool:
        view = await self.view()
        at = {m.worker: m for m in view.members if m.admitted}
        steps = [m.status.weights.version for m in at.values()]
        return set(at) >= set(self.kit.workers) and all(v is not None and v.step == version for v in steps)

    async def wrong_outputs(self) -> tuple[str, ...]:
        """Admitted workers whose greedy tokens aren't those of the trainer's own model at the version they claim."""
        expected = []
        for member in (await self.view()).members:
            version = member.status.weights.version
            if member.admitted and member.descriptor.completions_url is not None and version is not None:
                expected.append((member, self.tokens.get(version.step, ())))
        return await wrong_outputs(expected)

    async def lost_ops(self, op_ids: tuple[str, ...], limit_s: float) -> tuple[str, ...]:
        """Which of these ops the journal doesn't show as ended, after waiting for it that long."""
        lost = op_ids
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while lost:
                    with contextlib.suppress(DeadlineError, BrokenError):
                        items = (await self.client.history(100)).items
                        ended = {item.op_id for item in items if item.ended_at is not None}
                        lost = tuple(op_id for op_id in op_ids if op_id not in ended)
                    await asyncio.sleep(LOOK_S)
        return lost

    async def op_ends(self, above_step: int, limit_s: float) -> tuple[OpEnd, ...]:
        """How the updates to versions above that step ended, oldest first, by their reports in the journal.

        Those that aren't written down as ended within the limit are left out: they are lost.
        """
        found: dict[str, OpEnd] = {}
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while True:
                    with contextlib.suppress(DeadlineError, BrokenError):
                        wanted = await self._op_ids(above_step)
                        for op_id in [o for o in wanted if o not in found]:
                            if (end := await self._op_end(op_id)) is not None:
                                found[op_id] = end
                        if set(found) >= set(wanted):
                            break
                    await asyncio.sleep(LOOK_S)
        return tuple(sorted(found.values(), key=lambda end: end.step))

    async def _op_ids(self, above_step: int) -> list[str]:
        items = (await self.client.history(100)).items
        return [i.op_id for i in items if i.op == UPDATE and i.version is not None and i.version.step > above_step]

    async def _op_end(self, op_id: str) -> OpEnd | None:
        entry = await self._kv.get(f"{OPS}.{op_id}")
        report = None if entry is None else decode(entry.value, JournalEntry, op_id).report
        if report is None or report.version is None:
            return None
        outcomes = tuple((str(o.worker), o.outcome.value) for o in report.outcomes)
        return OpEnd(report.version.step, report.status.value, outcomes)

    def _on_news(self, news: News) -> None:
        if isinstance(news, Tokens):
            self.tokens[news.version] = news.tokens
        self.on_news(news)
