"""Whether what arrived is what was sent. Pure. The proof that a commit needs (SCENARIOS 47)."""

from collections.abc import Sequence

from rlbus.controller.causes import fault
from rlbus.schemas import Fault, FaultCode, ReceivedData, TensorSpec, TensorSum
from rlbus.transfer.sums import sums_digest


def check_sent(tensors: Sequence[TensorSpec], sums: Sequence[TensorSum]) -> Fault | None:
    """Whether the trainer's sums cover exactly what it announced, in order; the fault if not."""
    for spec, summed in zip(tensors, sums, strict=False):
        if spec.name != summed.name:
            return fault(
                FaultCode.SENDER_FAILED,
                f"the trainer sent {summed.name} where {spec.name} was announced",
                tensor=spec.name,
            )
    if len(tensors) != len(sums):
        return fault(FaultCode.SENDER_FAILED, f"the trainer sent {len(sums)} tensors, {len(tensors)} were announced")
    return None


def check_committed(digest: str | None, sums: Sequence[TensorSum]) -> Fault | None:
    """Whether what the trainer sent again is what the fleet has; `digest` None: nobody knows what that is."""
    if digest is None or sums_digest(sums) == digest:
        return None
    message = "what the trainer sent isn't what the fleet has under this version: its checksums are others"
    return fault(FaultCode.CHECKSUM_MISMATCH, message, committed=digest, sent=sums_digest(sums))


def check_received(sent: Sequence[TensorSum], received: ReceivedData | None) -> Fault | None:
    """Whether a worker's sums are the trainer's; the fault names the first tensor that differs."""
    if received is None:
        return fault(FaultCode.CHECKSUM_MISMATCH, "it didn't say what it received")
    for ours, theirs in zip(sent, received.sums, strict=False):
        if ours != theirs:
            return fault(
                FaultCode.CHECKSUM_MISMATCH,
                f"checksum of {ours.name} differs: sent {ours.checksum}, received {theirs.checksum} ({theirs.name})",
                tensor=ours.name,
                sent=ours.checksum,
                received=theirs.checksum,
            )
    if len(sent) != len(received.sums):
        first = sent[len(received.sums)].name if len(received.sums) < len(sent) else received.sums[len(sent)].name
        return fault(
            FaultCode.CHECKSUM_MISMATCH,
            f"{len(sent)} tensors were sent, {len(received.sums)} received; the first without a partner is {first}",
            tensor=first,
        )
    return None
