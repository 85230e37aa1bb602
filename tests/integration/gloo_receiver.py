"""A receiver in a process of its own, for test_gloo_group.py. Arguments: one JSON object; answers: JSON lines.

`ends` says what it does to itself once half of the bytes have come: nothing, "kill" (SIGKILL), "stop" (SIGSTOP), or
"fail" (its `load` raises). It receives the streams of `stream_ids` one after the other over the same group.
"""

import hashlib
import json
import os
import signal
import sys
from collections.abc import Iterator

import msgspec
import torch
from torch import Tensor

from rlbus.errors import TransferError
from rlbus.schemas import GroupPlan, TensorSpec
from rlbus.transfer.group import Group, open_group, prove
from rlbus.transfer.receiver import receive


class Order(msgspec.Struct):
    """What to do."""

    plan: GroupPlan
    rank: int
    specs: tuple[TensorSpec, ...]
    stream_ids: tuple[str, ...]
    ends: str = ""


def say(**values: object) -> None:
    print(json.dumps(values), flush=True)


def receive_one(group: Group, order: Order, stream_id: str) -> None:
    hashes: dict[str, str] = {}

    def on_progress(done: int, total: int) -> None:
        if done * 2 >= total and order.ends in ("kill", "stop"):
            os.kill(os.getpid(), signal.SIGKILL if order.ends == "kill" else signal.SIGSTOP)

    def load(tensors: Iterator[tuple[str, Tensor]]) -> None:
        for index, (name, tensor) in enumerate(tensors):
            if order.ends == "fail" and index == 1:
                raise ValueError("no such parameter")
            hashes[name] = hashlib.sha256(bytes(tensor.flatten().view(torch.uint8).numpy())).hexdigest()

    try:
        data = receive(group, order.specs, order.plan.bucket_bytes, load, on_progress, stream_id=stream_id)
    except (TransferError, ValueError) as exc:
        say(error=str(exc))
    else:
        say(hashes=hashes, num_bytes=data.num_bytes, sums={s.name: s.checksum for s in data.sums})


def main() -> None:
    torch.set_num_threads(1)
    order = msgspec.json.decode(sys.argv[1], type=Order)
    group = open_group(order.plan, order.rank)
    prove(group)
    say(joined=[group.rank, group.size, group.epoch])
    for stream_id in order.stream_ids:
        receive_one(group, order, stream_id)
    group.close()


if __name__ == "__main__":
    main()
