"""Copies of adapters that outlive the sidecar: which of them nobody comes back for."""

import os
from pathlib import Path

import pytest

from rlbus.workers.dynamo.copies import FOLDER, KEEP_S, sweep

pytestmark = pytest.mark.unit

NOW = 1_000_000_000.0


def kept(root: Path, who: str, copied_at: float, met_at: float | None) -> Path:
    """Copies of a worker that a sidecar has met last then; None: its notes are gone."""
    folder = root / FOLDER / who
    (folder / ("a" * 64)).mkdir(parents=True)
    os.utime(folder, (copied_at, copied_at))
    if met_at is not None:
        namespace, component, instance_id = who.split(".")
        ledger = root / namespace / component / f"{instance_id}.jsonl"
        ledger.parent.mkdir(parents=True, exist_ok=True)
        ledger.touch()
        os.utime(ledger, (met_at, met_at))
    return folder


def test_copies_go_when_no_sidecar_has_met_their_worker_for_a_week(tmp_path: Path) -> None:
    """However long ago they were made: Dynamo keeps an adapter for as long as it is wanted."""
    old, new = NOW - KEEP_S - 1.0, NOW - KEEP_S + 1.0
    living, gone = kept(tmp_path, "rlbus.backend.1", old, new), kept(tmp_path, "rlbus.backend.2", old, old)
    lost, fresh = kept(tmp_path, "rlbus.backend.3", old, None), kept(tmp_path, "rlbus.backend.4", new, None)
    sweep(str(tmp_path), NOW)
    assert [folder.exists() for folder in (living, gone, lost, fresh)] == [True, False, False, True]


def test_a_sweep_finds_nothing_where_nothing_was_kept(tmp_path: Path) -> None:
    """The first sidecar of a user."""
    sweep(str(tmp_path / "none"), NOW)
