"""The folder beside a blocked engine call."""

import threading
from pathlib import Path

import pytest

from rlbus.schemas import Fault, FaultCode, TensorSum
from rlbus.workers.vllm_server.exchange import CallFolder, Exchange, RankOutcome, Watch

pytestmark = pytest.mark.unit


@pytest.fixture
def folder(tmp_path: Path) -> CallFolder:
    """Of one call."""
    return Exchange(str(tmp_path)).open("test")


def test_progress_is_there_once_a_rank_stands_ready(folder: CallFolder) -> None:
    """Until then None; afterwards what it counted last."""
    assert folder.progress(1) is None
    counter = folder.open_counter(1, 100)
    assert folder.progress(1) == (0, 100)
    counter.update(60, 100)
    counter.close()
    assert folder.progress(1) == (60, 100)
    assert folder.progress(0) is None


def test_outcomes_are_kept_by_step_and_rank(folder: CallFolder) -> None:
    """Whole, with what they carry."""
    fault = Fault(code=FaultCode.TRANSFER_FAILED, message="no", detail={"a": "b"})
    sums = (TensorSum(name="w", checksum="0" * 16),)
    received = RankOutcome(num_bytes=8, num_tensors=1, sums=sums, weights_touched=True)
    folder.end("receive", 0, received)
    folder.end("receive", 1, RankOutcome(fault=fault))
    assert folder.outcome("receive", 0) == received
    assert folder.outcome("receive", 1) == RankOutcome(fault=fault)
    assert folder.outcome("finish", 0) is None


def test_a_call_is_stopped_with_a_reason_or_when_its_folder_is_gone(folder: CallFolder) -> None:
    """A rank whose agent went away must not wait for it."""
    assert folder.stop_reason() is None
    folder.stop("enough")
    assert folder.stop_reason() == "enough"
    folder.remove()
    assert folder.stop_reason() == "the agent is gone"


def test_late_words_into_a_removed_folder_are_no_error(folder: CallFolder) -> None:
    """Neither side knows when the other goes."""
    folder.remove()
    folder.stop("late")
    folder.end("receive", 0, RankOutcome())
    assert folder.outcome("receive", 0) is None


def test_watch_hands_on_the_reason_until_it_is_left(folder: CallFolder) -> None:
    """And its thread ends with it."""
    seen = threading.Event()

    def tick(reason: str | None) -> None:
        if reason == "enough":
            seen.set()

    with Watch(folder, tick):
        folder.stop("enough")
        assert seen.wait(60.0)
    assert all(thread.name != "rlbus watch" for thread in threading.enumerate())


def test_exchange_is_private_and_leaves_nothing(tmp_path: Path) -> None:
    """Its folders are the owner's alone; each call has one of its own."""
    exchange = Exchange(str(tmp_path))
    one, two = exchange.open("join"), exchange.open("join")
    assert one.path != two.path
    assert Path(one.path).stat().st_mode & 0o077 == 0
    assert Path(one.path).parent.stat().st_mode & 0o077 == 0
    exchange.close()
    exchange.close()
    assert list(tmp_path.iterdir()) == []
