"""What has to be looked up outside of the state before a command is accepted: the model's tensors, the file system.

Without side effects, and before anything is accepted.
"""

import logging
import os
from collections.abc import Sequence
from pathlib import Path

from rlbus.adapter import ADAPTER_FILES
from rlbus.errors import FaultError
from rlbus.schemas import Fault, FaultCode, TensorSpec
from rlbus.workers.checks import fault
from rlbus.workers.engines.base import Engine
from rlbus.workers.engines.draft import drafter

_log = logging.getLogger("rlbus.workers")

# JSON around one checksum: `["` + name + `","` + 16 digits + `"],`.
SUM_OVERHEAD_BYTES = 24
# The rest of the result message.
RESULT_OVERHEAD_BYTES = 1024


def manifest_problem(
    engine: Engine, tensors: Sequence[TensorSpec], max_bytes: int, is_draft: bool = False
) -> Fault | None:
    """Why this manifest can't be taken, or None: it doesn't fit the (draft) model, or its checksums no message."""
    sums_bytes = sum(len(spec.name.encode()) + SUM_OVERHEAD_BYTES for spec in tensors) + RESULT_OVERHEAD_BYTES
    if sums_bytes > max_bytes:
        return fault(
            FaultCode.TOO_LARGE,
            f"the checksums of {len(tensors)} tensors take {sums_bytes} bytes, a message at most {max_bytes}",
            size_bytes=sums_bytes,
            limit_bytes=max_bytes,
        )
    try:
        if is_draft:
            drafter(engine).check_draft_manifest(tensors)
        else:
            engine.check_manifest(tensors)
    except FaultError as exc:
        return exc.fault
    except Exception as exc:  # noqa: BLE001 - an adapter's bug: the log has it, the sender gets a refusal
        _log.exception("check_manifest raised")
        name = type(exc).__name__
        return fault(FaultCode.ENGINE_FAILED, f"the engine raised {name} while checking the manifest", error=name)
    return None


def path_problem(
    path: str, roots: tuple[str, ...], kind: str = "weight root", variable: str = "RLBUS_WEIGHT_ROOTS"
) -> Fault | None:
    """Why nothing may be loaded from `path`, or None. Links are followed before the comparison, those of the root that
    the path names first: another one may lie on a disk that hangs.
    """
    if not roots:
        return fault(FaultCode.WRONG_STATE, f"this worker has no {kind}; start it with one ({variable})", path=path)
    try:
        real = Path(os.path.realpath(path))
    except (ValueError, OSError) as exc:  # a NUL in it, links without end
        return fault(FaultCode.WRONG_STATE, f"{path!r} is no path that can be loaded from ({exc})", path=path)
    likely = sorted(roots, key=lambda root: not (Path(path).is_relative_to(root) or real.is_relative_to(root)))
    if not Path(path).is_absolute() or not any(real.is_relative_to(os.path.realpath(root)) for root in likely):
        return fault(FaultCode.WRONG_STATE, f"{path} is not below a {kind} of this worker", path=path)
    return None


def adapter_problem(folder: str, roots: tuple[str, ...]) -> Fault | None:
    """The same of an adapter's folder: links inside it may not lead out of the roots either. Stops at the first."""
    paths = (folder, *(os.path.join(folder, name) for name in ADAPTER_FILES))
    problems = (path_problem(path, roots, "adapter root", "RLBUS_LORA_ROOTS") for path in paths)
    return next((problem for problem in problems if problem is not None), None)
