"""The adopted workers' copies of adapters: they outlive the sidecar, as Dynamo does, which reads them again.

Those of a worker go with its process (`LoraFiles.drop`); of one that ended while no sidecar was there, with `sweep`.
"""

import contextlib
import logging
import shutil
from collections.abc import Mapping
from pathlib import Path

from rlbus.workers.config import ENV_NAMES

_log = logging.getLogger("rlbus.workers")

# Below the state folder, whose other folders are namespaces: those have no dot.
FOLDER = "lora.copies"
# After so long without a sidecar nobody comes back for a worker's copies. Source: rlbus._objects.DEFAULT_TTL_S, after
# which they couldn't be fetched again either.
KEEP_S = 7 * 86_400.0


def copies_dir(state_dir: str, environ: Mapping[str, str]) -> str:
    """Where they lie: where the user says, else beside what the agents remember."""
    return environ.get(ENV_NAMES["lora_cache_dir"]) or str(Path(state_dir, FOLDER))


def sweep(state_dir: str, now: float) -> None:
    """Remove those of workers whose agents have kept nothing for KEEP_S. Blocks; what can't be removed stays."""
    with contextlib.suppress(FileNotFoundError):
        for path in Path(state_dir, FOLDER).iterdir():
            namespace, _, rest = path.name.partition(".")
            component, _, instance_id = rest.partition(".")
            ledger = Path(state_dir, namespace, component, f"{instance_id}.jsonl")
            if now - _touched(ledger, path) > KEEP_S:
                _log.info("%s is of a worker that nobody has met for a week, and goes", path)
                shutil.rmtree(path, ignore_errors=True)


def _touched(*paths: Path) -> float:
    """When one of them was written last, in Unix seconds; a ledger is with every heartbeat."""
    found = [0.0]
    for path in paths:
        with contextlib.suppress(OSError):
            found.append(path.stat().st_mtime)
    return max(found)
