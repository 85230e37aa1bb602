"""What a fleet's book of adapters promises: numbers are given once, and stand for the same bytes for ever."""

import pytest
from msgspec.structs import replace

from rlbus.controller.lora_book import (
    MAX_FLEET_LORAS,
    MAX_PAST,
    LoraBook,
    gone_for,
    is_freeing,
    may_have_freed,
    should_have,
)
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
    book.take(["policy@4"], "op", ALL)
    assert book.next_revision("policy", [status("policy@2", "judge@90")]) == 5
    assert book.next_revision("policy", [status("policy@8")]) == 9
    assert book.next_revision("judge", []) == 1


def test_a_revision_stands_for_its_bytes_after_it_was_unloaded() -> None:
    """The same again is fine."""
    book = LoraBook()
    book.add(lora(1))
    book.take(["policy@1"], "op", ALL)
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
    book.take(["policy@1"], "op3", ALL)
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
    book.take(["policy@1"], "op", ALL)
    assert book.uses("k")
    book.take(["judge@1"], "op", ALL)
    assert not book.uses("k")


ALL, DECODE = Target(), Target(components=("decode",))
A_AND_B, B_ONLY = Target(components=("decode", "other")), Target(components=("other",))
DECODE_1, DECODE_2, OTHER = WorkerId("decode/1"), WorkerId("decode/2"), WorkerId("other/1")
ONLY_1 = Target(workers=(DECODE_1,))
FIRST, SECOND = Target(workers=(WorkerId("a/1"),)), Target(workers=(WorkerId("a/2"),))


def test_an_adapter_is_for_the_workers_of_all_its_loads_and_leaves_with_all_of_them() -> None:
    """One that was taken from a part of them is still the fleet's, for the others."""
    book = LoraBook()
    book.add(lora(1, target=FIRST))
    book.add(lora(1, target=SECOND))
    assert book.loras[0].target == Target(workers=(WorkerId("a/1"), WorkerId("a/2")))
    assert list(book.take(["policy@1"], "op", FIRST)) == ["policy@1"]
    assert book.loras[0].target == SECOND
    assert list(book.take(["policy@1"], "op", ALL)) == ["policy@1"]
    assert book.loras == ()


@pytest.mark.parametrize("target", [Target(components=("a",)), Target(workers=(WorkerId("a/1"), WorkerId("a/2")))])
def test_what_is_unloaded_from_all_workers_that_there_are_leaves_the_fleet(target: Target) -> None:
    """However they were named; when nobody can say yet who there is, it stays for those who may come."""
    book = LoraBook()
    book.add(lora(1))
    mark = book.mark(1)
    book.take(["policy@1"], "op", target, known=[WorkerId("a/1"), WorkerId("a/2")])
    assert book.loras == ()
    for known in (None, [WorkerId("a/1"), WorkerId("b/1")]):
        again = LoraBook()
        again.restore(mark, [])
        again.take(["policy@1"], "op", target, known=known)
        assert [should_have(again.loras[0], WorkerId(w)) for w in ("a/1", "a/2", "b/1")] == [False, False, True]


def test_a_load_on_a_worker_widens_one_on_another_component() -> None:
    """The component keeps it, also when the worker lets it go again."""
    book = LoraBook()
    book.add(lora(1, target=Target(components=("backend",))))
    book.add(lora(1, target=Target(workers=(DECODE_1,))))
    backend = WorkerId("backend/1")
    assert [should_have(book.loras[0], w) for w in (backend, DECODE_1, DECODE_2)] == [True, True, False]
    again = LoraBook()
    again.restore(book.mark(1), [])
    again.take(["policy@1"], "op", Target(workers=(DECODE_1,)))
    (one,) = again.loras
    assert (one.target, one.also_on) == (Target(components=("backend",)), ())


def test_a_load_on_one_worker_of_a_component_that_had_to_let_it_go_is_for_that_one_alone() -> None:
    """The others of the component aren't given it by that."""
    book = LoraBook()
    book.add(lora(1))
    book.take(["policy@1"], "op", DECODE)
    book.add(lora(1, target=Target(workers=(DECODE_1,))))
    assert [should_have(book.loras[0], w) for w in (DECODE_1, DECODE_2, OTHER)] == [True, False, True]


def test_a_load_on_a_component_and_a_worker_of_another_is_for_both() -> None:
    """As an op addresses them."""
    one = lora(1, target=Target(components=("other",), workers=(DECODE_1,)))
    assert [should_have(one, w) for w in (DECODE_1, DECODE_2, OTHER)] == [True, False, True]


def test_a_half_done_unload_in_the_journal_counts_for_the_next_leader() -> None:
    """What some let go is nobody's any more."""
    book = LoraBook()
    book.add(lora(1, op_id="op1"))
    again = LoraBook()
    request = UnloadLoraFleet(op_id="op2", name="policy")
    done = entry(request, "policy@1", Outcome.FAILED, partly=("policy@1",))
    assert done.report is not None
    assert done.report.lora is not None
    report = replace(done.report, lora=replace(done.report.lora, ids=()))
    again.restore(book.mark(1), [entry(load("op1"), "policy@1", Outcome.OK), replace(done, report=report)])
    assert again.loras == ()


@pytest.mark.parametrize(("freeing", "is_left"), [(("policy@1",), True), ((), False), (None, False)])
def test_an_unload_of_other_bytes_in_the_journal_leaves_the_fleets_to_be_given(
    freeing: tuple[str, ...] | None, is_left: bool
) -> None:
    """Its leader died before it wrote down what the fleet has. None: it doesn't say."""
    book, again = LoraBook(), LoraBook()
    book.add(lora(1, op_id="op1"))
    request = UnloadLoraFleet(op_id="op2", name="policy", target=ONLY_1)
    done = replace(entry(request, "policy@1", Outcome.OK), freeing=freeing)
    again.restore(book.mark(1), [entry(load("op1"), "policy@1", Outcome.OK), done])
    assert [should_have(one, DECODE_1) for one in again.loras] == [is_left]


@pytest.mark.parametrize(
    ("target", "ids", "sums", "may_be"),
    [
        (ONLY_1, (), (), True),
        (ONLY_1, ("policy@1",), (B,), True),
        (ONLY_1, ("policy@1",), (A,), False),
        (ONLY_1, ("policy@1",), (), False),
        (DECODE, (), (), False),
        (ALL, (), (), False),
    ],
)
def test_an_unload_of_which_nobody_wrote_down_whose_bytes_went_leaves_the_fleets_where_a_worker_was_named(
    target: Target, ids: tuple[str, ...], sums: tuple[str, ...], may_be: bool
) -> None:
    """As one is told to, of a worker with other bytes; whoever meant more workers meant the fleet's."""
    now = status()
    now = replace(now, loras=LorasView(ids=ids, capacity=4, sums=tuple(s[:16] for s in sums)))
    assert may_have_freed(lora(1), target, [now]) is may_be
    assert not may_have_freed(lora(1), target, [])


@pytest.mark.parametrize(
    ("target", "sums", "is_free"),
    [
        (DECODE, [B], True),
        (DECODE, [""], True),
        (DECODE, [A], False),
        (DECODE, [A, B], False),
        (DECODE, [None], False),
        (DECODE, [], False),
        (ALL, [B], False),
    ],
)
def test_an_unload_of_other_bytes_alone_leaves_the_fleets_to_be_given(
    target: Target, sums: list[str | None], is_free: bool
) -> None:
    """One that means everybody takes it from the fleet all the same. None: an agent that names no checksums."""
    before = [status("policy@1") for _ in sums]
    views = [LorasView(ids=("policy@1",), capacity=4, sums=() if s is None else (s[:16],)) for s in sums]
    before = [replace(one, loras=view) for one, view in zip(before, views, strict=True)]
    assert is_freeing(lora(1), target, before) is is_free


def test_a_failed_loads_number_stays_given_when_the_op_that_counted_last_has_left_the_journal() -> None:
    """Only the newest ops are kept; a number is for ever."""
    book, again = LoraBook(), LoraBook()
    book.add(lora(1, op_id="long ago"))
    again.restore(book.mark(1), [entry(load("op2", B), "policy@2", Outcome.FAILED)])
    assert again.next_revision("policy", []) == 3
    problem = again.problem("policy", 2, A)
    assert problem is not None
    assert problem.code is FaultCode.REVISION_TAKEN
    assert again.problem("policy", 2, B) is None
    assert again.loras == book.loras


def listing(*ids: str) -> LorasData:
    pairs = [i.split("@") for i in ids]
    views = tuple(LoraView(name=n, revision=int(r), state=LoraState.LOADED) for n, r in pairs)
    return LorasData(loras=views, capacity=4)


def test_what_no_engine_lists_any_more_went_for_the_newer_revision() -> None:
    """Older revisions of the same name only; one that some engine still serves is still the fleet's."""
    lists = (listing("policy@5", "policy@3"), listing("policy@5", "other@1"))
    assert gone_for(lora(5), (2, 3, 4, 5, 6), lists) == ("policy@2", "policy@4")
    assert gone_for(lora(1), (), lists) == ()


@pytest.mark.parametrize("of", [ALL, A_AND_B, Target(workers=(DECODE_1, DECODE_2, OTHER))])
def test_what_had_to_go_on_one_component_stays_the_fleets_for_the_others(of: Target) -> None:
    """Nobody of that component is given it again, also a worker that comes later; the others are."""
    book = LoraBook()
    book.add(lora(1, target=of, source=ObjectSource(bucket="test", key="k", sha256=A, num_bytes=1)))
    book.add(lora(2, target=DECODE))
    assert list(book.take(["policy@1"], "op2", DECODE)) == ["policy@1"]
    (one, _) = book.loras
    assert [should_have(one, w) for w in (DECODE_1, DECODE_2, OTHER)] == [False, False, True]
    assert book.uses("k"), "the others still have to be given it"
    assert book.take(["policy@1"], "op3", DECODE) == {}, "it isn't there any more"
    again = LoraBook()
    again.restore(book.mark(1), [])
    assert again.loras == book.loras


def test_what_had_to_go_everywhere_leaves_the_fleet() -> None:
    """Also piece by piece, if its load named whom it is for."""
    for target in (A_AND_B, Target(workers=(DECODE_1, OTHER))):
        book = LoraBook()
        book.add(lora(1, target=target))
        book.take(["policy@1"], "op", DECODE)
        book.take(["policy@1"], "op", B_ONLY)
        assert book.loras == ()
    book.add(lora(1, target=DECODE))
    assert list(book.take(["policy@1"], "op", ALL)) == ["policy@1"]
    assert book.loras == ()


def test_what_had_to_go_on_one_worker_is_given_to_the_rest_of_its_component() -> None:
    """Until it is loaded there again, or the component has it no more."""
    book = LoraBook()
    book.add(lora(1, target=A_AND_B))
    book.take(["policy@1"], "op", Target(workers=(DECODE_1,)))
    assert [should_have(book.loras[0], w) for w in (DECODE_1, DECODE_2, OTHER)] == [False, True, True]
    other = LoraBook()
    other.restore(book.mark(1), [])
    other.take(["policy@1"], "op", DECODE)
    assert (other.loras[0].target, other.loras[0].not_on) == (B_ONLY, ())
    book.add(lora(1, target=Target(components=("other",))))
    assert not should_have(book.loras[0], DECODE_1), "that load wasn't for it"
    book.add(lora(1, target=DECODE))
    assert should_have(book.loras[0], DECODE_1)


def test_the_journal_of_a_load_on_one_component_takes_what_went_there_from_that_one_alone() -> None:
    """The next leader's book is that of the one before."""
    first, second = load("op1"), load("op2", B)
    entries = [
        entry(replace(first, target=A_AND_B), "policy@1", Outcome.OK),
        entry(replace(second, target=DECODE), "policy@2", Outcome.OK, evicted=("policy@1",)),
    ]
    book = LoraBook()
    book.restore(None, entries)
    assert [(one.revision, one.target) for one in book.loras] == [(1, B_ONLY), (2, DECODE)]
