"""What the engine contract suite (tests/engines/test_contract.py) needs to know of an engine to run on it.

An adapter's author writes one module `tests/engines/cases_<name>.py` with a constant `CASE = EngineCase(...)`; the
suite finds it there. One opened engine serves all tests of a session, on one event loop, so a test leaves it running,
without a group, and with clean weights.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rlbus.schemas import GroupPlan, TensorSpec, TensorSum, Version
from rlbus.workers.engines.base import Engine, ReceiveOrder


@dataclass(frozen=True, slots=True)
class Generated:
    """A finished simulated or real request. `finish` is "length", "stop" or "abort"."""

    tokens: tuple[int, ...]
    finish: str


class OpenedEngine(Protocol):
    """A started engine with the other side of its data plane, and with a way to let it generate.

    `version` arguments select weights: equal versions mean equal weights, different ones different weights, and in
    every case the manifest is `tensors()`.
    """

    @property
    def engine(self) -> Engine:
        """Started."""
        ...

    def tensors(self) -> tuple[TensorSpec, ...]:
        """The manifest that fits the engine's model, in the order in which the sender sends."""
        ...

    async def plan(self, epoch: int) -> GroupPlan:
        """A plan with one trainer rank and the engine's span (component "backend", instance id "1") after it."""
        ...

    async def join_sender(self, plan: GroupPlan) -> None:
        """Join as rank 0. Called beside `engine.join_group`, which waits for it."""
        ...

    async def send(self, order: ReceiveOrder, num_tensors: int | None = None) -> tuple[TensorSum, ...]:
        """Send the weights of `order.version`: all, or the first `num_tensors` and then give up, as a dying trainer.

        Called once the receiver is ready. Returns the sums of all tensors, in the order of `tensors()`.
        """
        ...

    async def leave_sender(self) -> None:
        """Drop the sender's group, in whatever state it is. Idempotent."""
        ...

    async def save(self, folder: Path, version: Version) -> None:
        """Write the weights of `version` in the form that `engine.load_weights` takes."""
        ...

    async def generate(
        self, prompt: tuple[int, ...], num_tokens: int, request_id: str, on_token: Callable[[], None] | None = None
    ) -> Generated:
        """Decode greedily. `on_token` is called for each token as it appears (several may appear at once)."""
        ...


@dataclass(frozen=True, slots=True)
class EngineCase:
    """One engine in the contract suite.

    `marker` is "unit" for an engine that needs neither torch nor a process, else "engine". `loop_factory` makes the
    loop that the engine lives on (None: asyncio's). `settle_s` is how long to watch that a paused engine stays still.
    """

    name: str
    open: Callable[[Path], AbstractAsyncContextManager[OpenedEngine]]
    marker: str = "engine"
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None
    # Tokens of a request that is still running when the suite pauses or aborts it.
    long_tokens: int = 200
    settle_s: float = 0.1
    # Bound of every test, in seconds of that loop.
    limit_s: float = 60.0
    # Whether a direct full update heals after the sender died half-way (DESIGN section 4 rule 4).
    backend: str = "gloo"


# The shape of what `EngineCase.open` is decorated with.
OpenEngine = Callable[[Path], AsyncIterator[OpenedEngine]]
