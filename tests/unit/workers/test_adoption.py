"""What an agent makes of an engine that ran before it."""

import asyncio
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from rlbus.controller.op_ids import is_pause_of_op
from rlbus.schemas import (
    DRAFT_ROUTE,
    FaultCode,
    LoraState,
    PauseGeneration,
    PauseMode,
    ResultStatus,
    ResumeGeneration,
    Sleep,
    SleepTag,
    Version,
    WakeUp,
    WeightsState,
    WeightsView,
)
from rlbus.testing import run
from rlbus.workers.adoption import FOUND_LEASE_S, INITIAL, adopt
from rlbus.workers.checks import check_body
from rlbus.workers.engines.fake import DEFAULT_TENSORS, FakeEngine
from rlbus.workers.engines.fake_script import FakeScript, Step, failing
from rlbus.workers.engines.found import Found
from rlbus.workers.engines.lora import Resident
from rlbus.workers.ledger import Ledger, Noted, come_back, noted
from rlbus.workers.loras import lora_event, sum_of
from rlbus.workers.moves import LorasSeen
from rlbus.workers.slept import slept
from rlbus.workers.state import Adapter, Running, WorkerState
from rlbus.workers.testing import COMPONENT, INSTANCE_ID, NAMESPACE, code_of, worker_on_bus

pytestmark = pytest.mark.unit

FRESH = WorkerState(component="backend", instance_id="7", world_size=1, routes=frozenset())
V7 = Version(step=7)
CLEAN_7 = WeightsView(state=WeightsState.CLEAN, version=V7, last_good=V7)
DIRTY = WeightsView(state=WeightsState.DIRTY)
BOTH = frozenset(SleepTag)


def past(weights: WeightsView) -> Noted:
    """What the agent before noted."""
    return Noted(term=3, epoch=None, epoch_term=0, weights=weights)


def adopted(before: Noted | None, found: Found) -> WorkerState:
    """The state that the next agent begins with."""
    return adopt(FRESH if before is None else come_back(FRESH, before), before, found, 100.0)


def test_weights_that_the_engine_labels_as_noted_are_the_noted_ones() -> None:
    """Both say the same: it is the engine of before, with what was committed last."""
    state = adopted(past(CLEAN_7), Found("0.7", is_paused=False, is_torn=False))
    assert state.weights == CLEAN_7
    assert (state.term, state.pause) == (3, None)


@pytest.mark.parametrize("label", [None, "0.6", "somebody's"])
def test_weights_of_another_label_are_unknown(label: str | None) -> None:
    """Another server, or somebody else's update: what was noted is no claim of this engine."""
    state = adopted(past(CLEAN_7), Found(label, is_paused=False, is_torn=False))
    assert state.weights == WeightsView(state=WeightsState.UNKNOWN)


def test_weights_that_were_not_clean_are_not_made_so() -> None:
    """The agent died after the label, and before it knew that all ranks had finished."""
    updating = WeightsView(state=WeightsState.UPDATING, last_good=V7)
    assert adopted(past(updating), Found("0.7", False, False)).weights.state is WeightsState.UNKNOWN


def test_torn_weights_stay_torn() -> None:
    """Whoever notes them: DESIGN section 4 rule 4, they aren't resumed on."""
    for before in (past(CLEAN_7), None):
        state = adopted(before, Found("torn", is_paused=True, is_torn=True))
        assert state.weights.state is WeightsState.DIRTY
        assert state.owes_flush


def test_server_that_nobody_labelled_is_as_any_fresh_engine() -> None:
    """It has what it was started from; one that somebody labelled hasn't."""
    assert adopted(None, Found(None, False, False)) == FRESH
    assert adopted(None, Found("0.7", False, False)).weights.state is WeightsState.UNKNOWN


def test_weights_that_nobody_ever_replaced_stay_what_the_server_was_started_from() -> None:
    """Both say so: a sidecar that is started again finds what a first one would. A label says otherwise."""
    assert FRESH.weights == INITIAL
    state = adopted(past(INITIAL), Found(None, is_paused=False, is_torn=False))
    assert (state.weights, state.term) == (INITIAL, 3)
    for weights, label in (
        (INITIAL, "0.7"),
        (WeightsView(state=WeightsState.UNKNOWN), None),
        (WeightsView(state=WeightsState.UPDATING), None),
        (WeightsView(state=WeightsState.DIRTY), None),
        (WeightsView(state=WeightsState.CLEAN, last_good=V7), None),
    ):
        assert adopted(past(weights), Found(label, False, False)).weights == WeightsView(state=WeightsState.UNKNOWN)
    assert adopted(past(INITIAL), Found(None, True, is_torn=True)).weights.state is WeightsState.DIRTY


def test_torn_draft_stays_torn_and_the_target_is_what_it_was() -> None:
    """And the reverse: each has its own label, and neither is taken for the other."""
    fresh = replace(FRESH, draft=INITIAL)
    before = msgspec.structs.replace(past(CLEAN_7), draft=CLEAN_7)
    torn = WeightsView(state=WeightsState.DIRTY, last_good=V7)
    state = adopt(come_back(fresh, before), before, Found("0.7", False, False, is_draft_torn=True), 100.0)
    assert (state.weights, state.draft, state.owes_flush) == (CLEAN_7, torn, True)
    state = adopt(come_back(fresh, before), before, Found("torn", False, is_torn=True, draft_label="0.7"), 100.0)
    assert (state.weights, state.draft) == (torn, CLEAN_7)
    # No less where it can't be updated any more; a whole one isn't shown there.
    state = adopt(come_back(FRESH, before), before, Found("0.7", False, False, is_draft_torn=True), 100.0)
    assert (state.weights, state.draft, state.owes_flush) == (CLEAN_7, torn, True)
    assert adopt(FRESH, None, Found("0.7", False, False, is_draft_torn=True), 100.0).draft == DIRTY
    assert adopt(come_back(FRESH, before), before, Found("0.7", False, False), 100.0).draft is None


def test_torn_draft_that_no_update_reaches_keeps_the_engine_from_generating_and_says_what_frees_it() -> None:
    """Its checkpoint can't be read any more, so the route isn't served: a restart of the server does, or force."""
    state = adopted(None, Found("0.7", is_paused=True, is_torn=False, is_draft_torn=True))
    state = replace(state, routes=frozenset({"resume_generation"}))
    fault = check_body(state, ResumeGeneration())
    assert fault is not None
    assert fault.code is FaultCode.DIRTY
    assert "no update reaches it here: restart the engine's server, or resume with force" in fault.message
    assert check_body(state, ResumeGeneration(force=True)) is None
    fault = check_body(replace(state, routes=frozenset({DRAFT_ROUTE})), ResumeGeneration())
    assert fault is not None
    assert fault.message.endswith("a full update makes them clean")


def test_draft_is_at_the_version_that_was_noted_only_if_the_engine_says_so() -> None:
    """As the target's weights: by the label; what nobody has updated is as it was loaded."""
    fresh, unknown = replace(FRESH, draft=INITIAL), WeightsView(state=WeightsState.UNKNOWN)
    for noted_draft, label, made in (
        (CLEAN_7, "0.7", CLEAN_7),
        (CLEAN_7, "0.6", unknown),
        (CLEAN_7, None, unknown),
        (INITIAL, None, INITIAL),
        (None, None, unknown),
        (None, "0.7", unknown),
    ):
        before = msgspec.structs.replace(past(INITIAL), draft=noted_draft)
        assert adopt(come_back(fresh, before), before, Found(None, False, False, label), 100.0).draft == made
    assert adopt(fresh, None, Found(None, False, False), 100.0).draft == INITIAL
    assert adopt(fresh, None, Found(None, False, False, "0.7"), 100.0).draft == unknown
    assert noted(replace(FRESH, draft=CLEAN_7)).draft == CLEAN_7


def test_pause_of_an_engine_whose_draft_rlbus_has_updated_gets_a_lease() -> None:
    """Without a ledger, and without a label of the target: that of the draft is ours as well."""
    for found in (Found(None, True, False, "0.3"), Found(None, True, False, is_draft_torn=True)):
        assert adopted(None, found).pause is not None


def test_pause_of_a_dead_agent_gets_a_lease() -> None:
    """It ends by itself, with the caches flushed."""
    state = adopted(past(CLEAN_7), Found("0.7", is_paused=True, is_torn=False))
    assert state.pause is not None
    assert state.lease is not None
    assert (state.pause.owner, state.pause.expires_at) == ("an agent before this one", 100.0 + FOUND_LEASE_S)
    assert (state.lease.lease_s, state.owes_flush) == (FOUND_LEASE_S, True)


def test_pause_of_somebody_unknown_is_left_alone() -> None:
    """A person paused the server by hand before it was put on the bus."""
    state = adopted(None, Found(None, is_paused=True, is_torn=False))
    assert state == replace(FRESH, owes_flush=True)


@pytest.mark.parametrize("found", [Found("0.7", is_paused=True, is_torn=False), Found("x", True, is_torn=True)])
def test_pause_of_an_engine_that_rlbus_has_updated_gets_a_lease_without_a_ledger_too(found: Found) -> None:
    """Audit of issue 4, 15: its weights have a label of ours, or an update of ours has torn them."""
    state = adopted(None, found)
    assert state.pause is not None
    assert (state.pause.owner, state.pause.expires_at) == ("an agent before this one", 100.0 + FOUND_LEASE_S)


@pytest.mark.parametrize("is_torn", [False, True])
def test_sleep_that_was_noted_goes_on_without_a_lease(is_torn: bool) -> None:
    """It lasts until somebody wakes it, whoever has died; an engine that runs has been woken, and what can't sleep
    doesn't.
    """
    before = Noted(term=3, epoch=None, epoch_term=0, weights=CLEAN_7, asleep=tuple(BOTH))
    fresh = replace(come_back(FRESH, before), sleep_tags=BOTH)
    state = adopt(fresh, before, Found("0.7", is_paused=True, is_torn=is_torn), 100.0)
    assert (state.asleep, state.pause, state.lease) == (BOTH, None, None)
    assert not adopt(fresh, before, Found("0.7", is_paused=False, is_torn=is_torn), 100.0).asleep
    state = adopt(replace(fresh, sleep_tags=frozenset()), before, Found("0.7", True, is_torn), 100.0)
    assert not state.asleep
    assert state.lease is not None


class Outliving(FakeEngine):
    """An engine that ran before, and can't say what of it sleeps."""

    found = Found("0.7", is_paused=True, is_torn=False)
    told: frozenset[SleepTag] | None = None

    def go_on_asleep(self, tags: frozenset[SleepTag]) -> None:
        """See `FoundAsleep`."""
        self.told = tags


def file_of(folder: Path) -> Path:
    """Where the ledger is."""
    return folder / NAMESPACE / COMPONENT / f"{INSTANCE_ID}.jsonl"


def ledger_at(folder: Path, weights: WeightsView) -> Ledger:
    """With what the agent before noted."""
    with_past = Ledger.open(folder, NAMESPACE, COMPONENT, INSTANCE_ID)
    assert with_past is not None
    with_past.note(past(weights))
    with_past.close()
    again = Ledger.open(folder, NAMESPACE, COMPONENT, INSTANCE_ID)
    assert again is not None
    return again


def test_agent_resumes_what_its_predecessor_left_paused_and_notes_what_it_found(tmp_path: Path) -> None:
    """At the end of the lease, with flushed caches; a third agent would find the same."""

    async def main() -> None:
        engine = Outliving()
        with ledger_at(tmp_path, CLEAN_7) as ledger:
            async with worker_on_bus(engine, ledger=ledger) as rig:
                assert rig.agent.state.weights == CLEAN_7
                await asyncio.sleep(FOUND_LEASE_S - 1.0)
                assert "resume" not in engine.calls
                await asyncio.sleep(2.0)
                assert [call for call in engine.calls if call != "observe"][-2:] == ["flush_cache", "resume"]
                assert rig.agent.state.pause is None
        with Ledger.open(tmp_path, NAMESPACE, COMPONENT, INSTANCE_ID) or pytest.fail("no ledger") as third:
            assert third.past.noted is not None
            assert third.past.noted.weights == CLEAN_7

    run(main())


def test_agent_that_dies_at_once_again_takes_nothing_from_the_next(tmp_path: Path) -> None:
    """What it found is noted before anything happens."""

    async def main() -> None:
        with ledger_at(tmp_path, CLEAN_7) as ledger:
            async with worker_on_bus(Outliving(), ledger=ledger):
                pass
        with Ledger.open(tmp_path, NAMESPACE, COMPONENT, INSTANCE_ID) or pytest.fail("no ledger") as third:
            assert third.past.noted is not None
            assert third.past.noted.weights == CLEAN_7

    run(main())


def test_agent_does_not_resume_on_weights_that_it_found_torn(tmp_path: Path) -> None:
    """Not at the end of the lease, and not when it is asked to."""

    async def main() -> None:
        engine = Outliving()
        engine.found = Found("torn", is_paused=True, is_torn=True)
        with ledger_at(tmp_path, CLEAN_7) as ledger:
            async with worker_on_bus(engine, ledger=ledger) as rig:
                await asyncio.sleep(FOUND_LEASE_S * 2)
                assert code_of(await rig.send(ResumeGeneration(), term=3)) is FaultCode.DIRTY
                assert "resume" not in engine.calls

    run(main())


@pytest.mark.parametrize("has_ledger", [True, False])
def test_agent_pauses_what_it_found_generating_on_torn_weights(tmp_path: Path, has_ledger: bool) -> None:
    """Audit of issue 4, 15: in a pause that an update may end, and no end of a lease does."""

    async def main() -> None:
        engine = Outliving()
        engine.found = Found("torn", is_paused=False, is_torn=True)
        with ledger_at(tmp_path, CLEAN_7) as ledger:
            async with worker_on_bus(engine, ledger=ledger if has_ledger else None) as rig:
                await asyncio.sleep(FOUND_LEASE_S * 2)
                pause = rig.agent.state.pause
                assert pause is not None
                assert is_pause_of_op(pause.owner)
                assert engine.requests.is_paused
                assert "resume" not in engine.calls

    run(main())


def test_agent_pauses_what_it_found_generating_with_a_torn_draft_until_the_draft_is_whole(tmp_path: Path) -> None:
    """As on torn weights; an update of the draft ends it, and the target's weights are those that were noted."""

    async def main() -> None:
        engine = Outliving(draft_tensors=DEFAULT_TENSORS)
        engine.found = Found("0.7", is_paused=False, is_torn=False, is_draft_torn=True)
        with ledger_at(tmp_path, CLEAN_7) as ledger:
            async with worker_on_bus(engine, ledger=ledger) as rig:
                await asyncio.sleep(FOUND_LEASE_S * 2)
                assert engine.requests.is_paused
                state = rig.agent.state
                assert (state.weights, state.draft) == (CLEAN_7, WeightsView(state=WeightsState.DIRTY))
                assert code_of(await rig.send(ResumeGeneration(), term=3)) is FaultCode.DIRTY

    run(main())


def test_agent_tries_again_to_pause_what_it_found_generating_on_torn_weights(tmp_path: Path) -> None:
    """The first pause fails; it isn't resumed for that, and it doesn't go on generating."""

    async def main() -> None:
        engine = Outliving(FakeScript({"pause": {1: failing()}}))
        engine.found = Found("torn", is_paused=False, is_torn=True)
        with ledger_at(tmp_path, CLEAN_7) as ledger:
            async with worker_on_bus(engine, ledger=ledger) as rig:
                await asyncio.sleep(FOUND_LEASE_S)
                assert engine.requests.is_paused
                assert rig.agent.state.pause is not None
                assert "resume" not in engine.calls

    run(main())


def test_agent_that_is_stopped_in_the_middle_of_an_op_lets_an_engine_go_that_outlives_it(tmp_path: Path) -> None:
    """Nobody renews the lease of that pause any more, and nobody is there to see its end; a hold is for ever."""

    async def main() -> None:
        for lease_s, is_paused in ((30.0, False), (None, True)):
            engine = Outliving()
            engine.found = Found("0.7", is_paused=False, is_torn=False)
            async with worker_on_bus(engine) as rig:
                body = PauseGeneration(owner="op-1-pause", lease_s=lease_s)
                assert (await rig.send(body)).status is ResultStatus.OK
            assert engine.requests.is_paused is is_paused

    run(main())


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_agent_leaves_asleep_what_its_predecessor_put_to_sleep_until_somebody_wakes_it(
    tmp_path: Path, is_interrupted: bool
) -> None:
    """Also if that one died before the engine had answered."""

    async def main() -> None:
        engine = Outliving(FakeScript({"sleep": {1: Step(latency_s=5.0)}}))
        engine.found = Found("0.7", is_paused=False, is_torn=False)
        with ledger_at(tmp_path, CLEAN_7) as ledger:
            async with worker_on_bus(engine, ledger=ledger) as rig:
                sent = rig.post(Sleep(), term=3)
                await asyncio.sleep(1.0 if is_interrupted else 10.0)
                assert bool(sent.results) is not is_interrupted
                left = file_of(tmp_path).read_bytes()
        file_of(tmp_path).write_bytes(left)  # that agent didn't end, it died
        engine = Outliving()
        await engine.sleep(BOTH, 1, PauseMode.KEEP)
        with Ledger.open(tmp_path, NAMESPACE, COMPONENT, INSTANCE_ID) or pytest.fail("no ledger") as ledger:
            async with worker_on_bus(engine, ledger=ledger) as rig:
                await asyncio.sleep(FOUND_LEASE_S * 2)
                assert (engine.told, rig.agent.state.asleep) == (BOTH, BOTH)
                assert "resume" not in engine.calls
                assert (await rig.send(WakeUp(), term=3, op_id="w")).status is ResultStatus.OK
                assert not engine.requests.is_paused
                assert not engine.violations
        with Ledger.open(tmp_path, NAMESPACE, COMPONENT, INSTANCE_ID) or pytest.fail("no ledger") as third:
            assert third.past.noted is not None
            assert not third.past.noted.asleep

    run(main())


def test_agent_wakes_what_a_sleep_that_failed_left_asleep_under_its_predecessor(tmp_path: Path) -> None:
    """Whoever was told that it failed won't; what somebody had put to sleep before stays so."""
    kv, weights = frozenset({SleepTag.KV_CACHE}), frozenset({SleepTag.WEIGHTS})

    async def main() -> None:
        engine = Outliving(FakeScript({"sleep": {2: failing(after_parts=1)}, "wake_up": {0: failing()}}))
        engine.found = Found("0.7", is_paused=False, is_torn=False)
        with ledger_at(tmp_path, CLEAN_7) as ledger:
            async with worker_on_bus(engine, ledger=ledger) as rig:
                assert (await rig.send(Sleep(tags=tuple(kv)), term=3, op_id="a")).status is ResultStatus.OK
                assert code_of(await rig.send(Sleep(tags=tuple(weights)), term=3, op_id="b")) is FaultCode.ENGINE_FAILED
                assert rig.agent.state.to_wake == weights
                left = file_of(tmp_path).read_bytes()
        file_of(tmp_path).write_bytes(left)  # that agent didn't end, it died
        engine = Outliving()
        await engine.sleep(BOTH, 1, PauseMode.KEEP)
        with Ledger.open(tmp_path, NAMESPACE, COMPONENT, INSTANCE_ID) or pytest.fail("no ledger") as ledger:
            async with worker_on_bus(engine, ledger=ledger) as rig:
                await asyncio.sleep(FOUND_LEASE_S)
                assert (rig.agent.state.asleep, rig.agent.state.to_wake) == (kv, frozenset())
                assert "resume" not in engine.calls

    run(main())


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_weights_that_a_sleep_has_cost_are_torn_for_the_next_agent(is_interrupted: bool) -> None:
    """The label is still that of what was discarded, and a wake would let the engine generate on nothing."""
    body = Sleep(level=2)
    running = Running("s", body)
    before = replace(FRESH, weights=CLEAN_7, draft=CLEAN_7, sleep_tags=BOTH, running=running)
    before = before if is_interrupted else replace(slept(before, body), running=None)
    past = noted(before)
    state = adopt(
        replace(come_back(before, past), running=None), past, Found("0.7", True, False, draft_label="0.7"), 100.0
    )
    torn = WeightsView(state=WeightsState.DIRTY, last_good=V7)
    assert (state.weights, state.draft, state.asleep) == (torn, torn, BOTH)


def test_sleep_that_runs_is_wanted_whatever_an_earlier_one_left() -> None:
    """What is noted in its middle is what is so after it."""
    state = replace(FRESH, sleep_tags=BOTH, asleep=BOTH, to_wake=BOTH)
    assert noted(state).to_wake == tuple(sorted(BOTH))
    assert noted(replace(state, running=Running("s", Sleep(tags=(SleepTag.WEIGHTS,))))).to_wake == (SleepTag.KV_CACHE,)


def test_agent_knows_the_bytes_of_adapters_that_its_predecessor_loaded() -> None:
    """An engine that can't say from which files it has them (Dynamo) is no stranger after a restart of its sidecar."""
    before = msgspec.structs.replace(past(CLEAN_7), loras=(("policy", 7, "a" * 64),))
    state = adopted(before, Found("0.7", is_paused=False, is_torn=False))
    assert sum_of(state, Resident("policy", 7)) == "a" * 64
    assert sum_of(state, Resident("policy", 8)) is None
    loaded = replace(state, adapters=(Adapter("policy", 8, "b" * 64, LoraState.LOADED),))
    assert noted(loaded).loras == (("policy", 7, "a" * 64), ("policy", 8, "b" * 64))


def test_adapters_of_a_file_of_another_day_count_as_long_as_the_engine_lists_them() -> None:
    """No name is taken by one that is gone, and the rest of that day is no claim: a pause stays whose it is."""
    loras = (("policy", 7, "a" * 64), ("policy", 8, "b" * 64))
    state = adopt(FRESH, None, Found(None, is_paused=True, is_torn=False), 100.0, loras)
    assert state == replace(FRESH, owes_flush=True, found_sums=loras)
    seen, _ = lora_event(state, LorasSeen((Resident("policy", 7),), state.lora_turn))
    assert sum_of(seen, Resident("policy", 7)) == "a" * 64
    assert sum_of(seen, Resident("policy", 8)) is None
    assert noted(seen).loras == loras[:1]
