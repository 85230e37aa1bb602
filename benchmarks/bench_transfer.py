"""Speed of a transfer over loopback, beside what the machine and bare Gloo do; peak memory beyond the source.

    python benchmarks/bench_transfer.py [--receivers 1] [--mib 512] [--bucket-mib 16] [--repeats 5]

Prints one line of JSON. Speeds are the median of the repeats in GiB/s; `of_memcpy` and `of_bare_gloo` are ratios. Bare
Gloo is a loop of broadcasts of the same buckets between the same processes, without headers, checksums or tensors.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from rlbus.schemas import GroupPlan, Rendezvous, TensorSpec
from rlbus.transfer.checksum import tensor_checksum
from rlbus.transfer.group import Group, open_group, prove
from rlbus.transfer.manifest import num_bytes
from rlbus.transfer.meeting import host_store
from rlbus.transfer.receiver import receive
from rlbus.transfer.sender import send
from rlbus.transfer.source import weight_source

MIB = 1024 * 1024
GIB = 1024 * MIB
TIMEOUT_S = 60.0


def specs_of(total_mib: int) -> tuple[TensorSpec, ...]:
    """A model's mix: most bytes in 32 MiB matrices, and a norm of 16 KiB for each."""
    specs = []
    for i in range(max(1, total_mib // 32)):
        specs.append(TensorSpec(name=f"layer{i}.weight", dtype="bfloat16", shape=(4096, 4096)))
        specs.append(TensorSpec(name=f"layer{i}.norm", dtype="float32", shape=(4096,)))
    return tuple(specs)


def bare_gloo(group: Group, total_bytes: int, bucket_bytes: int) -> None:
    """The same bytes through Gloo alone."""
    buffer = torch.zeros(bucket_bytes, dtype=torch.uint8)
    for _ in range(-(-total_bytes // bucket_bytes)):
        group.broadcast(buffer)


def member(rank: int, options: argparse.Namespace) -> dict[str, float]:
    """One process's part of every measurement; rank 0's are what is reported."""
    torch.set_num_threads(1)
    specs = specs_of(options.mib)
    total = sum(num_bytes(spec) for spec in specs)
    bucket_bytes = options.bucket_mib * MIB
    plan = GroupPlan(
        epoch=1,
        group_id="bench",
        backend="gloo",
        num_trainer_ranks=1,
        world_size=options.receivers + 1,
        spans=(),
        rendezvous=Rendezvous(host="127.0.0.1", port=options.port, prefix="bench"),
        bucket_bytes=bucket_bytes,
        timeout_s=TIMEOUT_S,
    )
    weights = {}
    if rank == 0:
        weights = {s.name: torch.ones(s.shape, dtype=getattr(torch, s.dtype)) for s in specs}
    source = weight_source(weights)
    group = open_group(plan, rank)

    def transfer(repeat: int) -> None:
        if rank == 0:
            send(group, source, specs, bucket_bytes, lambda _done, _total: None, stream_id=str(repeat))
        else:
            receive(group, specs, bucket_bytes, drop, lambda _done, _total: None, stream_id=str(repeat))

    peak = 0.0
    bare, ours = [], []
    for repeat in range(options.repeats):
        bare.append(timed(group, lambda: bare_gloo(group, total, bucket_bytes)))
        before = reset_peak()
        ours.append(timed(group, lambda repeat=repeat: transfer(repeat)))  # type: ignore[misc]
        peak = max(peak, (status_bytes("VmHWM") - before) / MIB)
    group.close()
    return {
        "gib": total / GIB,
        "bare_gloo_gib_s": total / GIB / statistics.median(bare),
        "rlbus_gib_s": total / GIB / statistics.median(ours),
        "peak_extra_mib": peak,
    }


def drop(tensors: object) -> None:
    """A `load` that keeps nothing."""
    while next(tensors, None) is not None:  # type: ignore[call-overload]
        pass


def timed(group: Group, work: Callable[[], None]) -> float:
    """Seconds from when all are ready until all have ended."""
    prove(group)
    began = time.perf_counter()
    work()
    prove(group)
    return time.perf_counter() - began


def status_bytes(field: str) -> int:
    """A field of /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise LookupError(field)


def reset_peak() -> int:
    """Start the peak of this process anew; what it has now."""
    Path("/proc/self/clear_refs").write_text("5")
    return status_bytes("VmRSS")


def best_gib_s(work: Callable[[], object], num_bytes: int) -> float:
    """Speed of the fastest of five."""
    times = []
    for _ in range(5):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return num_bytes / GIB / min(times)


def machine_gib_s() -> tuple[float, float]:
    """What one core copies, and sums up, in GiB/s."""
    row = torch.ones(256 * MIB, dtype=torch.uint8)
    other = torch.zeros_like(row)
    return best_gib_s(lambda: other.copy_(row), row.numel()), best_gib_s(lambda: tensor_checksum(row), row.numel())


def main() -> None:
    """Start the receivers, be the sender, print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--receivers", type=int, default=1)
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--bucket-mib", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--port", type=int, default=0)
    options = parser.parse_args()
    if options.rank:
        print(json.dumps(member(options.rank, options)), flush=True)
        return
    torch.set_num_threads(1)
    memcpy, checksum = machine_gib_s()
    store = host_store("127.0.0.1")
    options.port = store.port
    base = [
        sys.executable,
        __file__,
        *(f"--{n.replace('_', '-')}={v}" for n, v in vars(options).items() if n != "rank"),
    ]
    members = [
        subprocess.Popen([*base, f"--rank={rank}"], stdout=subprocess.PIPE, text=True)
        for rank in range(1, options.receivers + 1)
    ]
    try:
        found = member(0, options)
        outs = [process.communicate(timeout=TIMEOUT_S)[0] for process in members]
    finally:
        for process in members:
            process.kill()
            process.wait()
    receiver_peak = max(json.loads(out)["peak_extra_mib"] for out in outs)
    sender_peak = found.pop("peak_extra_mib")
    report = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}",
        "receivers": options.receivers,
        "bucket_mib": options.bucket_mib,
        **found,
        "memcpy_gib_s": memcpy,
        "checksum_gib_s": checksum,
        "of_memcpy": found["rlbus_gib_s"] / memcpy,
        "of_bare_gloo": found["rlbus_gib_s"] / found["bare_gloo_gib_s"],
        "sender_peak_extra_mib": sender_peak,
        "receiver_peak_extra_mib": receiver_peak,
    }
    print(json.dumps({k: round(v, 3) if isinstance(v, float) else v for k, v in report.items()}))


if __name__ == "__main__":
    main()
