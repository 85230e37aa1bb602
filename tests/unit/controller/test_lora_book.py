"""What a fleet's book of adapters promises: numbers are given once, and stand for the same bytes for ever."""

import pytest

from rlbus.controller.lora_book import MAX_FLEET_LORAS, MAX_PAST, LoraBook, both, covers, gone_for
from rlbus.schemas import (
    FaultCode,
    FleetLora,
    FolderSource,
    Generation,
    HistoryItem,
    JournalEntry,
    LoadLoraFleet,
    LoraResult,
    LorasData,
    LoraState,
    LorasView,
    LoraView,
    ObjectSource,
    OpStatus,
    Outcome,
    Report,
    Target,
    UnloadLoraFleet,
    WeightsState,
    WeightsView,
    WorkerId,
    WorkerOutcome,
    WorkerStatus,
)

pytestmark = pytest.mark.unit

A, B = "a" * 64, "b" * 64
FOLDER = FolderSource(path="/a")


def lora(revision: int, name: str = "policy", checksum: str = A, op_id: str = "op", **changes: object) -> FleetLora:
    values = {"name": name, "revision": revision, "checksum": checksum, "source": FOLDER, "since": 1.0, "op_id": op_id}
    return FleetLora(**{**values, **changes})  # type: ignore[arg-type]


def status(*ids: str) -> WorkerStatus:
    weights = WeightsView(state=WeightsState.CLEAN)
    return WorkerStatus(generation=Generation.RUNNING, weights=weights, loras=LorasView(ids=ids, capacity=4))


def entry(
    request: LoadLoraFleet | UnloadLoraFleet, what: str, outcome: Outcome | None, **lora_of: object
) -> JournalEntry:
    """An op of the journal; without an outcome it has no end."""
    item = HistoryItem(
        op_id=request.op_id, op="x", caller="c", term=1, began_at=1.0, phase="load", num_workers=1, what=what
    )
    report = None
    if outcome is not None:
        result = LoraResult(ids=(what,), **lora_of)  # type: ignore[arg-type]
        one = WorkerOutcome(worker=WorkerId("backend/1"), outcome=outcome, phase="load")
        report = Report(
            op_id=request.op_id, op="x", status=OpStatus.OK, outcomes=(one,), phases_s={}, took_s=1.0, lora=result
        )
    return JournalEntry(item=item, request=request, members=(WorkerId("backend/1"),), report=report)


def load(op_id: str, checksum: str = A, name: str = "policy") -> LoadLoraFleet:
    return LoadLoraFleet(op_id=op_id, name=name, source=FOLDER, checksum=checksum)


def test_the_next_revision_is_above_all_that_were_given_or_that_a_worker_has() -> None:
    """Also above one that failed, was unloaded, or that somebody loaded by hand."""
    book = LoraBook()
    assert book.next_revision("policy", [status()]) == 1
    book.give("policy", 3, A)
    book.add(lora(4))
    book.remove(["policy@4"], "op")
    assert book.next_revision("policy", [status("policy@2", "judge@90")]) == 5
    assert book.next_revision("policy", [status("policy@8")]) == 9
    assert book.next_revision("judge", []) == 1


def test_a_revision_stands_for_its_bytes_after_it_was_unloaded() -> None:
    """The same again is fine."""
    book = LoraBook()
    book.add(lora(1))
    book.remove(["policy@1"], "op")
    assert book.problem("policy", 1, A) is None
    taken = book.problem("policy", 1, B)
    assert taken is not None
    assert (taken.code, taken.detail["checksum"]) == (FaultCode.REVISION_TAKEN, A)


def test_what_is_remembered_is_bounded_and_keeps_the_newest_of_each_name() -> None:
    """A long run, one adapter a step, beside a name that was used once long ago."""
    book = LoraBook()
    book.give("judge", 1, B)
    for revision in range(1, 2 * MAX_PAST):
        book.give("policy", revision, A)
    assert len(book.mark(1).past) == MAX_PAST
    assert book.next_revision("judge", []) == 2
    assert book.next_revision("policy", []) == 2 * MAX_PAST


def test_a_fleet_has_a_bounded_number_of_adapters() -> None:
    """One more is refused before anything is begun."""
    book = LoraBook()
    for number in range(MAX_FLEET_LORAS):
        book.add(lora(1, name=f"n{number}"))
    full = book.problem("policy", 1, A)
    assert full is not None
    assert full.code is FaultCode.NO_CAPACITY
    assert book.problem("n0", 1, A) is None


def test_another_leader_restores_the_same_book() -> None:
    """From what was written down."""
    book = LoraBook()
    for revision in (1, 2):
        book.add(lora(revision, op_id=f"op{revision}"))
    book.remove(["policy@1"], "op3")
    again = LoraBook()
    again.restore(book.mark(7), [])
    assert again.mark(8) == LoraBook.mark(book, 8)
    assert again.loras == (lora(2, op_id="op2"),)


def test_ops_after_the_last_one_that_counts_are_counted_from_the_journal() -> None:
    """A leader that died between the end of an op and the writing of its book; older ops count for nothing."""
    book = LoraBook()
    book.add(lora(1, op_id="op1"))
    entries = [
        entry(load("op0"), "policy@9", Outcome.OK),
        entry(load("op1"), "policy@1", Outcome.OK),
        entry(load("op2", B), "policy@2", Outcome.OK, evicted=("policy@1",)),
        entry(load("op3"), "policy@3", Outcome.UNDONE),
        entry(load("op4"), "policy@4", None),
    ]
    again = LoraBook()
    again.restore(book.mark(1), entries)
    assert [(one.revision, one.checksum) for one in again.loras] == [(2, B)]
    assert again.next_revision("policy", []) == 5
    again.restore(None, [entry(UnloadLoraFleet(op_id="op5", name="policy"), "policy@2", Outcome.OK)])
    assert again.loras == ()


def test_an_object_is_used_as_long_as_some_adapter_comes_from_it() -> None:
    """By its key."""
    source = ObjectSource(bucket="test", key="k", sha256=A, num_bytes=1)
    book = LoraBook()
    book.add(lora(1, source=source))
    book.add(lora(1, name="judge", source=source))
    book.remove(["policy@1"], "op")
    assert book.uses("k")
    book.remove(["judge@1"], "op")
    assert not book.uses("k")


ALL, DECODE = Target(), Target(components=("decode",))
FIRST, SECOND = Target(workers=(WorkerId("a/1"),)), Target(workers=(WorkerId("a/2"),))


def test_an_adapter_is_for_the_workers_of_all_its_loads_and_leaves_with_all_of_them() -> None:
    """One that was taken from a part of them is still the fleet's."""
    book = LoraBook()
    book.add(lora(1, target=FIRST))
    book.add(lora(1, target=SECOND))
    assert book.loras[0].target == Target(workers=(WorkerId("a/1"), WorkerId("a/2")))
    assert book.remove(["policy@1"], "op", FIRST) == ()
    assert len(book.remove(["policy@1"], "op", ALL)) == 1


@pytest.mark.parametrize(
    ("target", "of", "is_covered"),
    [
        (ALL, DECODE, True),
        (DECODE, ALL, False),
        (DECODE, DECODE, True),
        (FIRST, ALL, False),
        (FIRST, FIRST, True),
        (FIRST, SECOND, False),
        (DECODE, FIRST, False),
    ],
)
def test_who_is_meant_by_one_target_is_meant_by_another(target: Target, of: Target, is_covered: bool) -> None:
    """As far as names tell."""
    assert covers(target, of) is is_covered
    assert both(target, ALL) == ALL
    assert both(target, target) == target


def listing(*ids: str) -> LorasData:
    pairs = [i.split("@") for i in ids]
    views = tuple(LoraView(name=n, revision=int(r), state=LoraState.LOADED) for n, r in pairs)
    return LorasData(loras=views, capacity=4)


def test_what_no_engine_lists_any_more_went_for_the_newer_revision() -> None:
    """Older revisions of the same name only; one that some engine still serves is still the fleet's."""
    lists = (listing("policy@5", "policy@3"), listing("policy@5", "other@1"))
    assert gone_for(lora(5), (2, 3, 4, 5, 6), lists) == ("policy@2", "policy@4")
    assert gone_for(lora(1), (), lists) == ()
