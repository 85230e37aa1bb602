"""`rlbus demo`: server, controller, engines and a trainer, each a process, on a model made on the spot.

Nothing is special about the pieces: the demo starts the same commands that a user would (`rlbus controller`,
`rlbus worker ...`), and the trainer is a plain script. Kill any of them but the trainer: it is started again, as a
service manager would, and the training goes on. The demo ends within bounds, and takes everything down that it started.
"""

import asyncio
import contextlib
import importlib.util
import json
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path

import msgspec
from rich.console import Console

from rlbus._process import Child
from rlbus.demo.events import Failed, Ready, StepDone, Summary, TrainerEvent, summarise
from rlbus.demo.services import Services, new_instance_id
from rlbus.demo.table import StepTable
from rlbus.errors import BrokenError, ConfigError, DeadlineError, RLBusError
from rlbus.server import EmbeddedServer

ENGINES = ("torch", "vllm")
VOCAB_SIZE = 512
NAMESPACE = "demo"
# The whole demo; on 2 cores it takes about 2 minutes with vLLM.
DEADLINE_S = 900.0
# How often the line that says what is waited for is renewed.
TICK_S = 5.0


async def main(*, engine: str, workers: int, updates: int, as_json: bool) -> int:
    """Run the demo. Prints the summary as one line of JSON, last on stdout; the table goes to stderr with `as_json`.

    Returns 0, or 1 when one of the demo's promises doesn't hold.
    Raises: ConfigError: options that can't be. BrokenError, DeadlineError: something failed.
    Cancel: everything is taken down.
    """
    console = Console(stderr=as_json)
    _check(engine, workers, updates)
    summary = await _run(console, engine, workers, updates)
    for problem in summary.problems:
        Console(stderr=True).print(f"rlbus demo: {problem}", style="bold red", highlight=False)
    print(json.dumps(msgspec.to_builtins(summary)), flush=True)
    return 1 if summary.problems else 0


def _check(engine: str, workers: int, updates: int) -> None:
    if engine not in ENGINES:
        raise ConfigError("engine", engine, f"use one of {', '.join(ENGINES)}")
    if workers < 1:
        raise ConfigError("workers", workers, "use 1 or more")
    if updates < 1:
        raise ConfigError("updates", updates, "use 1 or more")


async def _run(console: Console, engine: str, workers: int, updates: int) -> Summary:
    if importlib.util.find_spec("torch") is None:
        raise ConfigError("engine", engine, 'the demo trains with torch: pip install "rlbus[torch]"')
    title = f"rlbus demo: {workers} x {engine}, {updates} updates"
    steps: list[StepDone] = []
    with _folder() as folder, StepTable(console, title) as table:
        table.status("making a tiny random model")
        model = await asyncio.to_thread(_make_model, folder / "model")
        async with EmbeddedServer(store_dir=folder / "nats") as server, contextlib.AsyncExitStack() as stack:
            services = await _start(stack, server.url, engine, workers, model, folder)
            trainer = await _start_trainer(stack, server.url, engine, workers, updates, model, folder)
            table.status(f"waiting for {workers} {engine} engines to start")
            keeping = asyncio.create_task(_keep(services, server, table.status))
            try:
                async with asyncio.timeout(DEADLINE_S):
                    async for event in _events(trainer, services, keeping, table, workers, engine):
                        steps.append(event)
                        table.add(event)
            except TimeoutError as exc:
                raise DeadlineError("the demo", DEADLINE_S, f"{len(steps)} of {updates} updates were done") from exc
            finally:
                keeping.cancel()
                await asyncio.gather(keeping, return_exceptions=True)
            if await trainer.wait() != 0 or len(steps) != updates:
                raise BrokenError("trainer", f"ended after {len(steps)} of {updates} updates\n{trainer.log_tail()}")
    return summarise(engine, workers, steps)


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """A temporary folder for model and logs; kept, and named on stderr, when the demo fails."""
    folder = Path(tempfile.mkdtemp(prefix="rlbus-demo-"))
    try:
        yield folder
    except RLBusError:
        Console(stderr=True).print(f"rlbus demo: logs are kept in {folder}", highlight=False, soft_wrap=True)
        raise
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)


def _make_model(folder: Path) -> Path:
    # Needs torch, which the rest of this process doesn't.
    from rlbus.workers.torch_lm.make import make_tiny_model

    make_tiny_model(folder, vocab_size=VOCAB_SIZE)
    return folder


async def _start(
    stack: contextlib.AsyncExitStack, url: str, engine: str, workers: int, model: Path, folder: Path
) -> Services:
    """Start the controller and the workers, which `stack` stops."""
    services = Services({"RLBUS_URL": url, "RLBUS_NAMESPACE": NAMESPACE, **_engine_env(engine)}, folder)
    stack.push_async_callback(services.stop)
    jobs: list[tuple[str, list[str]]] = [("controller", ["controller"])]
    for i in range(workers):
        who = ["--instance-id", new_instance_id()]
        jobs.append((f"worker-{i + 1}", ["worker", engine, str(model), *who, *_engine_options(engine)]))
    for name, command in jobs:
        await services.start(name, [sys.executable, "-m", "rlbus", *command])
    return services


async def _start_trainer(
    stack: contextlib.AsyncExitStack, url: str, engine: str, workers: int, updates: int, model: Path, folder: Path
) -> Child:
    policy = "transformers" if engine == "vllm" else "torch"
    argv = [sys.executable, "-m", "rlbus.demo.trainer", "--model", str(model)]
    argv += ["--policy", policy, "--vocab-size", str(VOCAB_SIZE), "--workers", str(workers), "--updates", str(updates)]
    # The URL has the token: it is none of the arguments, which everybody on the machine can read.
    env = {"OMP_NUM_THREADS": "1", "RLBUS_URL": url, "RLBUS_NAMESPACE": NAMESPACE}
    child = await Child.start("trainer", argv, env=env, log=folder / "trainer.log", stdout=asyncio.subprocess.PIPE)
    stack.push_async_callback(child.stop)
    return child


def _engine_env(engine: str) -> dict[str, str]:
    if engine != "vllm":
        return {}
    from rlbus.workers.vllm_server.supervisor import small_machine_env

    return small_machine_env()


def _engine_options(engine: str) -> Sequence[str]:
    """vLLM options for a tiny model on a machine without a GPU, in vLLM's own spelling."""
    if engine != "vllm":
        return ()
    return ("--dtype", "float32", "--enforce-eager", "--max-model-len", "256", "--kv-cache-memory-bytes", str(64 << 20))


async def _keep(services: Services, server: EmbeddedServer, on_restart: Callable[[str], None]) -> None:
    """Start again what ends by itself: the server, the controller, a worker. Raises: BrokenError: once too often."""
    tasks = [asyncio.create_task(services.keep(on_restart)), asyncio.create_task(server.supervise(on_restart))]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def _events(
    trainer: Child, services: Services, keeping: "asyncio.Task[None]", table: StepTable, workers: int, engine: str
) -> AsyncIterator[StepDone]:
    """The trainer's steps, until its output ends. Raises BrokenError when it, or one of the others, gave up."""
    assert trainer.stdout is not None
    started = time.monotonic()
    while True:
        reading = asyncio.ensure_future(trainer.stdout.readline())
        while not reading.done():
            await asyncio.wait({reading, keeping}, timeout=TICK_S, return_when=asyncio.FIRST_COMPLETED)
            if keeping.done():
                reading.cancel()
                keeping.result()
            if not services.is_ready:
                waited = time.monotonic() - started
                table.status(f"waiting for {workers} {engine} engines to start ({waited:.0f} s)")
        line = reading.result()
        if not line:
            return
        event = msgspec.json.decode(line, type=TrainerEvent)
        match event:
            case Failed(message=message):
                raise BrokenError("trainer", message)
            case Ready(workers=names):
                services.is_ready = True
                table.status(f"training on {', '.join(names)}")
            case StepDone():
                yield event
