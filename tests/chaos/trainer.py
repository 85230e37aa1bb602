"""The trainer process that gets killed and stopped: an ordinary caller of `update_weights`, told when by JSON lines.

Weights follow from the version, so that every trainer has the same ones for it. `python -m tests.chaos.trainer`.
"""

import argparse
import asyncio
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import torch

import rlbus
from rlbus.demo.policy import NEAR_TIE, LanguageModel, TorchModel, TransformersModel, greedy
from rlbus.errors import PartialError, RLBusError
from rlbus.schemas import Fault, TensorSpec
from rlbus.transfer.source import weight_source
from tests.chaos.messages import PROBE_PROMPT, PROBE_TOKENS, Ended, Held, LetGo, News, Order, Tokens, Up, Update

# Small, so that much of a transfer is still to come when half of it is there.
BUCKET_BYTES = 1 << 20
# The longest that a source waits to be let go.
HOLD_S = 10.0
# Spread enough that greedy tokens of different versions differ from the first on.
STD = 0.05


def emit(news: News) -> None:
    """Write one line to the harness; from any thread."""
    sys.stdout.buffer.write(msgspec.json.encode(news) + b"\n")
    sys.stdout.buffer.flush()


def set_weights(module: torch.nn.Module, version: int) -> None:
    """Overwrite every parameter with that of `version`."""
    generator = torch.Generator().manual_seed(version)
    with torch.no_grad():
        for parameter in module.parameters():
            base = 1.0 if parameter.ndim == 1 else 0.0
            parameter.copy_(base + STD * torch.randn(parameter.shape, generator=generator))


def probe(model: LanguageModel) -> tuple[int, ...]:
    """The model's greedy tokens, up to where rounding could choose another."""
    own = greedy(model, PROBE_PROMPT, PROBE_TOKENS)
    num_sure = next((i for i, gap in enumerate(own.gaps) if gap < NEAR_TIE), PROBE_TOKENS)
    return own.tokens[:num_sure]


class HeldSource:
    """A source that waits once, before the tensor in its middle. Its owner may do so for ever; this one for HOLD_S."""

    def __init__(self, module: torch.nn.Module, gate: threading.Event, on_held: Callable[[], None]) -> None:
        self._source = weight_source(module)
        self._gate = gate
        self._on_held = on_held

    def specs(self) -> tuple[TensorSpec, ...]:
        """See `WeightSource`."""
        return self._source.specs()

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        """See `WeightSource`."""
        middle = len(self.specs()) // 2
        for i, (name, tensor) in enumerate(self._source):
            if i == middle and not self._gate.is_set():
                self._on_held()
                self._gate.wait(HOLD_S)
                self._gate.set()
            yield name, tensor


class Caller:
    """Obeys orders, one update at a time."""

    def __init__(self, trainer: rlbus.AsyncTrainer, model: LanguageModel) -> None:
        self._trainer = trainer
        self._model = model
        self._gate = threading.Event()
        self._updating: asyncio.Task[None] | None = None

    async def obey(self, orders: asyncio.StreamReader) -> None:
        """Until there are no more."""
        while line := await orders.readline():
            match msgspec.json.decode(line, type=Order):
                case Update() as order:
                    self._updating = asyncio.create_task(self._update(order))
                case LetGo():
                    self._gate.set()

    async def _update(self, order: Update) -> None:
        await asyncio.to_thread(set_weights, self._model.module, order.version)
        emit(Tokens(version=order.version, tokens=await asyncio.to_thread(probe, self._model)))
        self._gate = threading.Event()
        if not order.hold:
            self._gate.set()
        source = HeldSource(self._model.module, self._gate, lambda: emit(Held(version=order.version)))
        began_s = time.monotonic()
        try:
            end = await self._trainer.update_weights(
                source,
                version=order.version,
                deadline_s=order.deadline_s,
                stall_s=order.stall_s,
                bucket_bytes=BUCKET_BYTES,
            )
            report = end.report
        except PartialError as exc:
            report = exc.report
        except RLBusError as exc:
            text = f"{type(exc).__name__}: {exc}"
            emit(Ended(version=order.version, took_s=time.monotonic() - began_s, error=text))
            return
        emit(
            Ended(
                version=order.version,
                took_s=time.monotonic() - began_s,
                op_id=report.op_id,
                status=report.status.value,
                outcomes={o.worker: (o.outcome.value, o.phase, _text_of(o.fault)) for o in report.outcomes},
                error=_text_of(report.fault),
            )
        )


def _text_of(fault: Fault | None) -> str:
    return "" if fault is None else f"{fault.code.value}: {fault.message}"


async def serve(args: argparse.Namespace) -> None:
    """Connect, then obey until stdin ends."""
    model: LanguageModel = TransformersModel(args.model) if args.policy == "transformers" else TorchModel(args.model)
    orders = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(orders), sys.stdin)
    async with rlbus.connect(args.url, namespace=args.namespace) as bus:
        emit(Up())
        await Caller(bus.trainer(snapshot="memory"), model).obey(orders)


def main() -> None:
    """Entry of the process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", required=True)
    parser.add_argument("--namespace", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--policy", choices=("transformers", "torch"), required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    asyncio.run(serve(args))


if __name__ == "__main__":
    main()
