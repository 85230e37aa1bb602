"""Peak memory of one end of a transfer beyond what it had before, in a process of its own; for test_transfer_memory.py.

Argument: "send" or "receive", and the layout of the tensor. Prints the extra bytes. The other end is a group that takes
or gives bytes without keeping any, so that nothing but the end itself is measured.
"""

import sys
from pathlib import Path

import torch
from torch import Tensor

from rlbus.schemas import TensorSpec
from rlbus.transfer.buckets import plan_buckets
from rlbus.transfer.manifest import num_bytes
from rlbus.transfer.receiver import receive
from rlbus.transfer.sender import send
from rlbus.transfer.source import weight_source
from rlbus.transfer.stream import HEADER_BYTES, Header, pack_header, stream_token

BUCKET_BYTES = 8 * 1024 * 1024
SIDE = 8192
SPECS = (
    TensorSpec(name="large", dtype="float32", shape=(SIDE, SIDE)),
    *(TensorSpec(name=f"small{i}", dtype="float32", shape=(500_000,)) for i in range(8)),
)


class Nobody:
    """A group whose other members are nobody: rank 0's bytes are dropped, rank 1 gets zeros with the right headers."""

    size, epoch, timeout_s = 2, 1, 1.0
    device = torch.device("cpu")

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._buckets = plan_buckets([num_bytes(spec) for spec in SPECS], BUCKET_BYTES)

    def broadcast(self, buffer: Tensor, meanwhile: object = None) -> None:
        if callable(meanwhile):
            meanwhile()
        if self.rank == 0:
            return
        buffer.zero_()
        if buffer.numel() == HEADER_BYTES:
            bucket = next(self._buckets)
            header = Header(stream_token("op", 1), bucket.index, bucket.num_bytes)
            buffer.copy_(torch.frombuffer(bytearray(pack_header(header)), dtype=torch.uint8))

    def all_sum(self, value: int) -> int:
        return value

    def busy_s(self) -> float:
        return 0.0

    def abort(self, reason: str) -> None:
        raise AssertionError(reason)

    def close(self) -> None:
        pass


def memory(field: str) -> int:
    """A field of /proc/self/status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise LookupError(field)


def main() -> None:
    torch.set_num_threads(1)
    side, layout = sys.argv[1:]
    weights = {}
    if side == "send":
        large = torch.zeros(SIDE, SIDE).fill_(1.0)
        weights = {"large": large if layout == "contiguous" else large.t()}
        weights |= {spec.name: torch.ones(spec.shape) for spec in SPECS[1:]}
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = memory("VmRSS")
    if side == "send":
        send(Nobody(0), weight_source(weights), SPECS, BUCKET_BYTES, lambda _done, _total: None, stream_id="op")
    else:
        receive(Nobody(1), SPECS, BUCKET_BYTES, drop, lambda _done, _total: None, stream_id="op")
    print(memory("VmHWM") - before)


def drop(tensors: object) -> None:
    assert hasattr(tensors, "__next__")
    while next(tensors, None) is not None:
        pass


if __name__ == "__main__":
    main()
