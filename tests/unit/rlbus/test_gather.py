"""The decisions of a scatter-gather, by table: events with times in, actions and outcomes out."""

import itertools

import pytest

from rlbus._gather import (
    MIN_WAKE_S,
    RESEND_PART,
    SETTLE_GRACE_S,
    Gather,
    Gathered,
    Limits,
    Send,
    Verb,
    by_component,
    who,
)
from rlbus.errors import ConfigError
from rlbus.schemas import (
    Accepted,
    Fault,
    FaultCode,
    OutcomeData,
    Progress,
    Result,
    ResultStatus,
    WorkerId,
    split_worker_id,
)

pytestmark = pytest.mark.unit

LIMITS = Limits(ack_s=2.0, stall_s=5.0, deadline_s=20.0)
A, B, C = WorkerId("x/1"), WorkerId("x/2"), WorkerId("y/1")
OP, ASK = "op", "ask"


def gather(*members: WorkerId, limits: Limits = LIMITS, boots: dict[WorkerId, str] | None = None) -> Gather:
    """A gather that began at 0."""
    return Gather(members=members, op_id=OP, ask_id=ASK, limits=limits, now_s=0.0, boots=boots or {})


def accepted(worker: WorkerId, *, op_id: str = OP, boot_id: str = "b") -> Accepted:
    component, instance_id = split_worker_id(worker)
    return Accepted(op_id=op_id, component=component, instance_id=instance_id, boot_id=boot_id)


def progress(worker: WorkerId, done: int, phase: str = "load") -> Progress:
    component, instance_id = split_worker_id(worker)
    return Progress(op_id=OP, component=component, instance_id=instance_id, boot_id="b", phase=phase, done=done)


def result(
    worker: WorkerId,
    *,
    op_id: str = OP,
    boot_id: str = "b",
    status: ResultStatus = ResultStatus.OK,
    took_s: float = 0.0,
) -> Result:
    component, instance_id = split_worker_id(worker)
    return Result(
        op_id=op_id, component=component, instance_id=instance_id, boot_id=boot_id, status=status, took_s=took_s
    )


def told(worker: WorkerId, *, running: bool, status: ResultStatus | None = None, of: str = OP) -> Result:
    """The worker's answer to the question what became of the op."""
    component, instance_id = split_worker_id(worker)
    data = OutcomeData(of_op_id=of, running=running, status=status)
    return Result(
        op_id=ASK, component=component, instance_id=instance_id, boot_id="b", status=ResultStatus.OK, data=data
    )


def told_unknown(worker: WorkerId) -> Result:
    component, instance_id = split_worker_id(worker)
    fault = Fault(code=FaultCode.UNKNOWN_OP, message="no record")
    return Result(
        op_id=ASK, component=component, instance_id=instance_id, boot_id="b", status=ResultStatus.REFUSED, fault=fault
    )


def code_of(g: Gather, worker: WorkerId) -> FaultCode:
    fault = g.outcomes[worker].fault
    assert fault is not None
    return fault.code


def run_until(g: Gather, end_s: float) -> list[tuple[float, Send]]:
    """Let time pass as the I/O would: call `on_time` whenever it wants. Returns actions with their times."""
    seen: list[tuple[float, Send]] = []
    while g.num_open and g.wake_s <= end_s:
        at_s = g.wake_s
        seen.extend((at_s, action) for action in g.on_time(at_s))
        assert g.wake_s > at_s
    return seen


def test_results_of_everybody_end_it() -> None:
    """One outcome per worker: ok, refused and failed alike are results."""
    g = gather(A, B)
    assert g.on_answer(result(A), 0.1) == (True, [])
    assert g.num_open == 1
    assert g.on_answer(result(B, status=ResultStatus.FAILED), 0.2) == (True, [])
    assert g.num_open == 0
    assert g.outcomes[A].is_ok
    assert not g.outcomes[B].is_ok
    assert not g.outcomes[B].is_unknown
    assert g.take_ended() == [g.outcomes[A], g.outcomes[B]]
    assert g.take_ended() == []


def test_repeats_and_strangers_are_dropped_and_counted() -> None:
    """The first result stands; an answer to another op is a stranger too."""
    g = gather(A, B)
    g.on_answer(result(A, took_s=1.0), 0.1)
    assert g.on_answer(result(A, took_s=2.0), 0.2) == (False, [])
    assert g.on_answer(result(C), 0.3) == (False, [])
    assert g.on_answer(result(B, op_id="other"), 0.3) == (False, [])
    assert g.on_answer(accepted(B), 0.4) == (True, [])
    assert g.on_answer(accepted(B), 0.5) == (False, [])
    assert (g.num_duplicates, g.num_strangers) == (2, 2)
    assert g.outcomes == {A: Gathered(A, result=result(A, took_s=1.0))}


def test_silence_is_resent_once_then_asked_about_then_reported_as_no_ack() -> None:
    """25 % of the ack limit, the ack limit, and the time to settle, in that order."""
    g = gather(A)
    assert run_until(g, 100) == [
        (RESEND_PART * 2.0, Send(A, Verb.COMMAND)),
        (2.0, Send(A, Verb.ASK)),
    ]
    assert code_of(g, A) is FaultCode.NO_ACK
    assert g.outcomes[A].is_unknown
    assert g.outcomes[A].result is None


def test_a_worker_that_acked_gets_no_repeat_and_may_take_until_it_stalls() -> None:
    """The ack limit is over with the first sign of life; the stall limit begins there."""
    g = gather(A)
    g.on_answer(accepted(A), 0.3)
    assert run_until(g, 5.29) == []
    assert run_until(g, 5.31) == [(5.3, Send(A, Verb.ASK))]


@pytest.mark.parametrize("lost_ack", [False, True])
def test_slow_but_progressing_is_no_stall(lost_ack: bool) -> None:
    """Whatever the stall limit, as long as `done` grows; progress also counts as the ack."""
    g = gather(A, limits=Limits(ack_s=2.0, stall_s=5.0, deadline_s=100.0))
    if not lost_ack:
        g.on_answer(accepted(A), 0.1)
    for i in range(20):
        assert run_until(g, 1.0 + 4.0 * i - 0.001) in ([], [(0.5, Send(A, Verb.COMMAND))])
        assert g.on_answer(progress(A, i), 1.0 + 4.0 * i) == (True, [])
    assert g.outcomes == {}


def test_progress_that_does_not_grow_is_a_stall() -> None:
    """Signs of life aren't progress; a new phase is, even from zero."""
    g = gather(A)
    g.on_answer(accepted(A), 0.0)
    g.on_answer(progress(A, 5), 1.0)
    g.on_answer(progress(A, 5), 2.0)
    g.on_answer(progress(A, 3), 3.0)
    g.on_answer(progress(A, 5), 4.0)
    assert run_until(g, 6.0) == [(6.0, Send(A, Verb.ASK))]
    g = gather(A)
    g.on_answer(progress(A, 5), 1.0)
    g.on_answer(progress(A, 0, phase="verify"), 5.0)
    assert run_until(g, 9.9) == []
    assert run_until(g, 10.0) == [(10.0, Send(A, Verb.ASK))]


def test_a_stalled_worker_that_says_it_runs_is_reported_so() -> None:
    """Not unknown: it is still at it."""
    g = gather(A)
    g.on_answer(accepted(A), 0.0)
    run_until(g, 5.0)
    assert g.on_answer(told(A, running=True), 5.1) == (False, [])
    assert code_of(g, A) is FaultCode.STALLED
    fault = g.outcomes[A].fault
    assert fault is not None
    assert fault.detail == {"settled": "running"}
    assert "made no progress for 5 s" in fault.message


def test_a_stalled_worker_that_progresses_while_asked_goes_on() -> None:
    """The question costs nothing; growth takes the verdict back."""
    g = gather(A)
    g.on_answer(accepted(A), 0.0)
    assert run_until(g, 5.0) == [(5.0, Send(A, Verb.ASK))]
    g.on_answer(progress(A, 1), 5.5)
    assert run_until(g, 10.4) == []
    g.on_answer(result(A), 10.4)
    assert g.outcomes[A].is_ok


def test_a_silent_worker_that_says_it_runs_is_waited_for() -> None:
    """Only its ack was lost: from then on the stall limit holds."""
    g = gather(A)
    run_until(g, 2.0)
    g.on_answer(told(A, running=True), 2.5)
    assert run_until(g, 7.4) == []
    assert run_until(g, 7.5) == [(7.5, Send(A, Verb.ASK))]


def test_a_running_worker_that_falls_silent_is_asked_long_before_the_deadline() -> None:
    """Its result may be lost: the signs of life that it owes every second have stopped."""
    limits = Limits(ack_s=2.0, stall_s=1000.0, deadline_s=1000.0)
    g = gather(A, B, limits=limits)
    for worker in (A, B):
        g.on_answer(accepted(worker), 0.0)
    for second in range(1, 60):
        assert run_until(g, float(second)) == ([(6.0, Send(A, Verb.ASK))] if second == 6 else [])
        g.on_answer(progress(B, 0), float(second))
        if second == 6:
            assert g.on_answer(told(A, running=False, status=ResultStatus.OK), 6.0) == (False, [Send(A, Verb.FETCH)])
            g.on_answer(result(A), 6.0)
    assert g.outcomes[A].is_ok
    assert g.num_open == 1


def test_signs_of_life_without_progress_do_not_put_the_stall_off() -> None:
    """Also when it was asked in between, and said that it runs."""
    g = gather(A, limits=Limits(ack_s=1.0, stall_s=5.0, deadline_s=100.0))
    g.on_answer(progress(A, 0), 0.0)
    assert run_until(g, 3.0) == [(3.0, Send(A, Verb.ASK))]
    g.on_answer(told(A, running=True), 3.1)
    g.on_answer(progress(A, 0), 4.0)
    assert run_until(g, 5.0) == [(5.0, Send(A, Verb.ASK))]
    g.on_answer(told(A, running=True), 5.1)
    assert code_of(g, A) is FaultCode.STALLED


def test_a_silent_worker_that_never_got_it_is_not_unknown() -> None:
    """`unknown_op`: nothing has begun there."""
    g = gather(A)
    run_until(g, 2.0)
    g.on_answer(told_unknown(A), 2.1)
    assert code_of(g, A) is FaultCode.NO_ACK
    assert not g.outcomes[A].is_unknown


def test_a_silent_worker_that_has_ended_is_asked_for_its_whole_result() -> None:
    """The outcome told lacks the data; the same command again returns the record."""
    g = gather(A)
    run_until(g, 2.0)
    assert g.on_answer(told(A, running=False, status=ResultStatus.OK), 2.1) == (False, [Send(A, Verb.FETCH)])
    assert g.on_answer(result(A, took_s=7.0), 2.2) == (True, [])
    assert g.outcomes[A] == Gathered(A, result=result(A, took_s=7.0))


def test_an_outcome_told_stands_when_the_whole_result_does_not_come() -> None:
    """Known to have ended ok, only without data."""
    g = gather(A)
    run_until(g, 2.0)
    g.on_answer(told(A, running=False, status=ResultStatus.REFUSED), 2.1)
    assert run_until(g, 100) == []
    assert g.outcomes[A] == Gathered(A, result=result(A, status=ResultStatus.REFUSED))


def test_the_whole_result_has_a_grace_of_its_own() -> None:
    """Told at the last moment that it ended, we still wait for the data."""
    g = gather(A)
    run_until(g, 2.0)
    g.on_answer(told(A, running=False, status=ResultStatus.OK), 3.9)
    run_until(g, 3.9 + SETTLE_GRACE_S - 0.01)
    assert g.num_open == 1
    run_until(g, 3.9 + SETTLE_GRACE_S)
    assert g.num_open == 0


def test_what_is_told_of_another_op_settles_nothing() -> None:
    """Nor does an answer to the question that comes when nothing was asked."""
    g = gather(A)
    assert g.on_answer(told(A, running=False, status=ResultStatus.OK), 0.1) == (False, [])
    run_until(g, 2.0)
    assert g.on_answer(told(A, running=False, status=ResultStatus.OK, of="other"), 2.1) == (False, [])
    assert g.outcomes == {}


def test_the_deadline_ends_it_for_everybody_after_asking() -> None:
    """Running, silent and ended workers are told apart within the grace."""
    g = gather(A, B, C, limits=Limits(ack_s=4.0, stall_s=30.0, deadline_s=10.0))
    for worker in (A, B, C):
        g.on_answer(accepted(worker), 0.1)
    assert run_until(g, 10.0) == [(10.0, Send(w, Verb.ASK)) for w in (A, B, C)]
    g.on_answer(told(A, running=True), 10.1)
    g.on_answer(progress(B, 7), 10.2)
    g.on_answer(result(C), 10.3)
    run_until(g, 10.0 + SETTLE_GRACE_S)
    assert code_of(g, A) is FaultCode.DEADLINE
    assert not g.outcomes[A].is_ok
    assert code_of(g, B) is FaultCode.DEADLINE
    assert g.outcomes[B].is_unknown
    assert g.outcomes[C].is_ok
    assert g.num_open == 0


def test_settling_is_bounded_by_the_deadline_but_never_below_the_grace() -> None:
    """Silence found 0.5 s before the deadline is settled 0.5 s after it at the latest."""
    g = gather(A, limits=Limits(ack_s=9.5, stall_s=30.0, deadline_s=10.0))
    run_until(g, 9.5 + SETTLE_GRACE_S - 0.01)
    assert g.num_open == 1
    run_until(g, 9.5 + SETTLE_GRACE_S)
    assert code_of(g, A) is FaultCode.NO_ACK


def test_an_answer_of_another_boot_is_a_lost_worker() -> None:
    """Whether the expected boot id was given, or seen in the first answer."""
    g = gather(A, B, boots={A: "b0"})
    assert g.on_answer(result(A, boot_id="b1"), 0.1) == (False, [])
    assert code_of(g, A) is FaultCode.WORKER_LOST
    g.on_answer(accepted(B, boot_id="b"), 0.1)
    g.on_answer(result(B, boot_id="b2"), 3.0)
    assert code_of(g, B) is FaultCode.WORKER_LOST
    assert g.num_open == 0


def test_a_reported_loss_ends_a_worker_at_once_unless_it_had_ended() -> None:
    """A result that was there before the loss stands."""
    g = gather(A, B)
    g.on_answer(result(A), 0.1)
    g.on_lost(A, "said goodbye")
    g.on_lost(B, "said goodbye")
    g.on_lost(C, "not ours")
    assert g.outcomes[A].is_ok
    assert code_of(g, B) is FaultCode.WORKER_LOST
    fault = g.outcomes[B].fault
    assert fault is not None
    assert fault.message == "x/2 is lost: said goodbye"


def test_nobody_on_the_broadcast_is_a_hint_and_asks_each_by_unicast() -> None:
    """Nobody is given up for it, and who has answered isn't asked."""
    g = gather(A, B, C)
    g.on_answer(accepted(A), 0.0)
    assert g.on_nobody_of("x") == [Send(B, Verb.COMMAND)]
    assert g.outcomes == {}


def test_nobody_on_a_workers_own_subject_counts_only_when_repeated() -> None:
    """The first 503 earns another try; one that answers meanwhile is heard."""
    g = gather(A, B)
    assert g.on_nobody(A, 0.1) == []
    assert g.on_nobody(B, 0.1) == []
    assert run_until(g, 0.6) == [(0.6, Send(A, Verb.COMMAND)), (0.6, Send(B, Verb.COMMAND))]
    g.on_nobody(A, 0.6)
    g.on_answer(accepted(B), 0.6)
    g.on_nobody(B, 0.6)
    fault = g.outcomes[A].fault
    assert fault is not None
    assert (fault.code, fault.message) == (FaultCode.NO_ACK, "x/1 is not there: nobody listens on its subject")
    assert fault.detail == {"heard_by": "nobody"}
    assert g.num_open == 1


def test_after_a_reconnect_nobody_on_a_subject_is_retried_until_the_ack_limit() -> None:
    """The others may come back later than we: 503s end nothing early then, nor for one that was heard before."""
    g = gather(A, B)
    g.on_answer(accepted(A), 0.1)
    g.on_disconnected()
    g.on_reconnected(1.0)
    seen: list[float] = []
    at_s = 1.0
    while at_s < 3.0:
        g.on_nobody(A, at_s)
        g.on_nobody(B, at_s)
        at_s = g.wake_s
        seen.append(at_s)
        g.on_time(at_s)
    assert seen == [1.5, 2.0, 2.5, 3.0]
    assert g.outcomes == {}
    g.on_answer(result(A), 3.1)
    g.on_answer(told_unknown(B), 3.1)
    assert g.outcomes[A].is_ok
    assert code_of(g, B) is FaultCode.NO_ACK


def test_while_we_are_deaf_nobodys_silence_counts() -> None:
    """Limits begin anew after the reconnect, and everybody open gets the command again."""
    g = gather(A, B, C)
    g.on_answer(accepted(A), 0.1)
    g.on_answer(result(B), 0.1)
    g.on_disconnected()
    assert run_until(g, 12.0) == []
    assert g.on_reconnected(12.0) == [Send(A, Verb.COMMAND), Send(C, Verb.COMMAND)]
    assert run_until(g, 12.4) == []
    g.on_answer(accepted(A), 12.4)
    assert run_until(g, 14.0) == [(12.5, Send(C, Verb.COMMAND)), (14.0, Send(C, Verb.ASK))]


def test_a_deaf_gather_ends_at_its_deadline_without_asking() -> None:
    """Nobody could answer anyway."""
    g = gather(A)
    g.on_answer(accepted(A), 0.1)
    g.on_disconnected()
    assert run_until(g, 20.0) == []
    assert code_of(g, A) is FaultCode.DEADLINE
    assert g.outcomes[A].is_unknown


def test_a_reconnect_after_the_deadline_sends_nothing() -> None:
    """Settling goes on as it was."""
    g = gather(A)
    g.on_answer(accepted(A), 0.1)
    g.on_answer(progress(A, 1), 4.0)
    g.on_answer(progress(A, 2), 8.0)
    g.on_answer(progress(A, 3), 12.0)
    g.on_answer(progress(A, 4), 16.0)
    assert run_until(g, 20.0) == [(20.0, Send(A, Verb.ASK))]
    g.on_disconnected()
    assert g.on_reconnected(20.5) == []
    run_until(g, 21.0)
    assert code_of(g, A) is FaultCode.DEADLINE


def test_time_is_looked_at_rarely_however_scattered_the_limits_are() -> None:
    """A pass over all workers costs O(N), so passes keep a least distance."""
    members = [WorkerId(f"x/{i}") for i in range(500)]
    g = Gather(members=members, op_id=OP, ask_id=ASK, limits=LIMITS, now_s=0.0)
    for i, worker in enumerate(members):
        g.on_answer(accepted(worker), i / 5000)
    wakes: list[float] = []
    while g.num_open:
        wakes.append(g.wake_s)
        g.on_time(g.wake_s)
    assert all(b - a >= MIN_WAKE_S - 1e-9 for a, b in itertools.pairwise(wakes))
    assert len(wakes) <= 2 + 2 * (0.1 / MIN_WAKE_S + 1)


@pytest.mark.parametrize("bad", [(0, 1, 1), (1, -1, 1), (1, 1, float("inf")), (1, 1, float("nan"))])
def test_limits_are_positive_and_finite(bad: tuple[float, float, float]) -> None:
    """Nothing waits without a limit."""
    with pytest.raises(ConfigError):
        Limits(*bad)


def test_why_is_the_fault_that_counts() -> None:
    """The gathering's own, or else that of the worker's result."""
    own = Fault(code=FaultCode.NO_ACK, message="m")
    theirs = Fault(code=FaultCode.BUSY, message="m")
    assert Gathered(A, fault=own).why is own
    refused = Result(op_id=OP, component="x", instance_id="1", boot_id="b", status=ResultStatus.REFUSED, fault=theirs)
    assert Gathered(A, result=refused).why is theirs
    assert Gathered(A, result=result(A)).why is None


def test_members_are_grouped_by_component_without_repeats() -> None:
    """In the order given."""
    assert by_component([B, C, A, B]) == {"x": ["2", "1"], "y": ["1"]}
    assert who(result(C)) == C
