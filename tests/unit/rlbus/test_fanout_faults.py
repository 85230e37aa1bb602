"""A fan-out when something is lost, repeated, late, gone or cancelled: still one true outcome per worker."""

import asyncio
from collections.abc import Callable

import pytest

from rlbus._gather import SETTLE_GRACE_S
from rlbus.errors import BrokenError, ClosedError
from rlbus.fanout import Limits, Losses
from rlbus.schemas import (
    ChecksumsData,
    Command,
    FaultCode,
    Result,
    WorkerAnswer,
    WorkerId,
)
from rlbus.testing import Faults, run
from tests.unit.rlbus.scripted_workers import LIMITS, Scene, ScriptedWorker, code_of, now_s

pytestmark = pytest.mark.unit


def test_duplicated_deliveries_change_nothing() -> None:
    """SCENARIOS 55: each worker runs it once, each outcome is counted once, each callback is called once."""

    async def scenario() -> tuple[int, list[list[str]], int, int]:
        scene = Scene()
        await scene.add(20)
        scene.transport.faults = Faults(duplicate=1.0)
        answers: list[WorkerId] = []
        outcomes: list[WorkerId] = []
        got = await scene.pause(
            on_answer=lambda w, _: answers.append(w), on_outcome=lambda g: outcomes.append(g.worker)
        )
        await asyncio.sleep(5)
        assert sorted(answers) == sorted(outcomes) == sorted(got)
        return sum(g.is_ok for g in got.values()), [w.runs for w in scene.workers], len(answers), len(outcomes)

    assert run(scenario()) == (20, [["op"]] * 20, 20, 20)


def test_a_lost_command_is_sent_again_with_the_same_op_id_after_a_quarter_of_the_ack_limit() -> None:
    """By unicast, to whom it was lost for alone."""

    async def scenario() -> tuple[float, bool, list[str], list[list[str]]]:
        scene = Scene()
        await scene.observe()
        first, second = await scene.add(2)
        scene.transport_of(second).faults = Faults(drop=1.0, only="dyn.ns.backend.rl.pause_generation")
        got = await scene.pause()
        return (
            now_s(),
            all(g.is_ok for g in got.values()),
            [m.subject for m in scene.published],
            [first.runs, second.runs],
        )

    ended_s, all_ok, published, runs = run(scenario())
    assert (ended_s, all_ok, runs) == (0.5, True, [["op"], ["op"]])
    assert published == ["dyn.ns.backend.rl.pause_generation", "dyn.ns.backend.rl.pause_generation.2"]


def test_a_lost_answer_is_repeated_and_the_command_is_not_run_twice() -> None:
    """The second command joins the first."""

    async def scenario() -> tuple[bool, list[str], int]:
        scene = Scene()
        (worker,) = await scene.add(1)
        scene.transport_of(worker).faults = Faults(drop=1.0, only="_INBOX.>")
        task = asyncio.ensure_future(scene.pause())
        await asyncio.sleep(0.1)
        scene.transport_of(worker).faults = Faults()
        got = await task
        return got[worker.id].is_ok, worker.runs, len(worker.heard)

    assert run(scenario()) == (True, ["op"], 2)


def test_a_mute_worker_is_asked_what_became_of_it_and_reported_as_unknown() -> None:
    """SCENARIOS 34: it got command, repeat and question, and nobody knows whether it did it."""

    async def scenario() -> tuple[FaultCode, bool, list[str], float]:
        scene = Scene()
        (worker,) = await scene.add(1, is_mute=True)
        got = await scene.pause()
        heard = [type(c.body).__name__ for c in worker.heard]
        return code_of(got[worker.id]), got[worker.id].is_unknown, heard, now_s()

    code, is_unknown, heard, ended_s = run(scenario())
    assert (code, is_unknown) == (FaultCode.NO_ACK, True)
    assert heard == ["PauseGeneration", "PauseGeneration", "GetOutcome"]
    assert ended_s == 4.0


def test_an_outcome_that_was_reached_in_silence_is_found_out_before_it_is_reported() -> None:
    """SCENARIOS 34: answers lost until the question is put: the recorded result is fetched, not guessed."""

    async def scenario() -> tuple[Result | None, list[str], float]:
        scene = Scene()
        (worker,) = await scene.add(1, is_mute=True, data=ChecksumsData(algorithm="x", sums=()))

        def unmute() -> None:
            worker.is_mute = False

        asyncio.get_running_loop().call_later(1.9, unmute)
        got = await scene.pause()
        return got[worker.id].result, worker.runs, now_s()

    result, runs, ended_s = run(scenario())
    assert result is not None
    assert result.data == ChecksumsData(algorithm="x", sums=())
    assert runs == ["op"]
    assert ended_s == 2.0


def test_an_outcome_found_out_after_the_deadline_is_fetched_with_a_fresh_expiry() -> None:
    """The command itself has expired by then; question and repeat have not."""

    async def scenario() -> tuple[Result | None, list[str], float]:
        scene = Scene()
        (worker,) = await scene.add(1, takes_s=3.0, data=ChecksumsData(algorithm="x", sums=()))
        loop = asyncio.get_running_loop()
        loop.call_later(0.5, setattr, worker, "is_mute", True)
        loop.call_later(4.0, setattr, worker, "is_mute", False)
        # On the way for a tenth of a second, so that both arrive after the deadline.
        scene.transport.faults = Faults(delay_s=(0.1, 0.1), only="dyn.>")
        got = await scene.pause(limits=Limits(ack_s=2.0, stall_s=30.0, deadline_s=5.0))
        return got[worker.id].result, worker.runs, now_s()

    result, runs, ended_s = run(scenario())
    assert result is not None
    assert result.data == ChecksumsData(algorithm="x", sums=())
    assert (runs, round(ended_s, 6)) == (["op"], 5.2)


def test_an_ack_brings_the_next_look_forward_when_the_stall_limit_is_the_shorter() -> None:
    """The one timer follows the earliest limit, whatever it was set to before."""

    async def scenario() -> tuple[FaultCode, float]:
        scene = Scene()
        (worker,) = await scene.add(1, takes_s=50.0, progresses=False)
        got = await scene.pause(limits=Limits(ack_s=40.0, stall_s=2.0, deadline_s=100.0))
        return code_of(got[worker.id]), now_s()

    assert run(scenario()) == (FaultCode.STALLED, 2.0)


def test_nobody_listening_ends_soon_but_not_at_the_first_hint() -> None:
    """SCENARIOS 55: 503 on the broadcast, on the unicasts, and again after a quarter of the ack limit."""

    async def scenario() -> tuple[list[FaultCode], float]:
        scene = Scene()
        got = await scene.pause(members=["backend/1", "backend/2"])
        return [code_of(g) for g in got.values()], now_s()

    assert run(scenario()) == ([FaultCode.NO_ACK, FaultCode.NO_ACK], 0.5)


def test_a_worker_that_comes_back_between_two_hints_is_heard() -> None:
    """A 503 is no proof that it is gone."""

    async def scenario() -> tuple[bool, float]:
        scene = Scene()
        (worker,) = await scene.add(1)
        scene.broker.disconnect(scene.transport_of(worker))
        asyncio.get_running_loop().call_later(0.3, scene.broker.reconnect, scene.transport_of(worker))
        got = await scene.pause()
        return got[worker.id].is_ok, now_s()

    assert run(scenario()) == (True, 0.5)


def test_a_reconnect_in_the_middle_loses_no_outcome() -> None:
    """Answers given while we were away are asked for again; nobody runs it twice."""

    async def scenario() -> tuple[int, list[list[str]], float]:
        scene = Scene()
        await scene.add(10, takes_s=3.0)
        task = asyncio.ensure_future(scene.pause())
        await asyncio.sleep(1.5)
        scene.broker.disconnect(scene.transport)
        await asyncio.sleep(10)
        scene.broker.reconnect(scene.transport)
        got = await task
        return sum(g.is_ok for g in got.values()), [w.runs for w in scene.workers], now_s()

    assert run(scenario()) == (10, [["op"]] * 10, 11.5)


def test_a_server_restart_is_survived_when_the_workers_return_after_us() -> None:
    """SCENARIOS 55: everybody is cut off; we are back first; what the server then says of the others is no proof."""

    async def scenario() -> tuple[bool, list[str], float]:
        scene = Scene()
        (worker,) = await scene.add(1, takes_s=3.0)
        task = asyncio.ensure_future(scene.pause())
        await asyncio.sleep(1.5)
        for transport in (scene.transport, scene.transport_of(worker)):
            scene.broker.disconnect(transport)
        await asyncio.sleep(0.5)
        scene.broker.reconnect(scene.transport)
        await asyncio.sleep(1.4)
        scene.broker.reconnect(scene.transport_of(worker))
        got = await task
        return got[worker.id].is_ok, worker.runs, now_s()

    assert run(scenario()) == (True, ["op"], 3.5)


def test_a_disconnect_without_return_ends_at_the_deadline() -> None:
    """As unknown: nobody could be asked."""

    async def scenario() -> tuple[FaultCode, bool, float]:
        scene = Scene()
        (worker,) = await scene.add(1, takes_s=3.0)
        task = asyncio.ensure_future(scene.pause())
        await asyncio.sleep(1.5)
        scene.broker.disconnect(scene.transport)
        got = await task
        return code_of(got[worker.id]), got[worker.id].is_unknown, now_s()

    assert run(scenario()) == (FaultCode.DEADLINE, True, 20.0)


def test_a_fanout_while_disconnected_sends_nothing_and_says_so() -> None:
    """Commands are published only while connected."""

    async def scenario() -> tuple[list[Command], int]:
        scene = Scene()
        (worker,) = await scene.add(1)
        scene.broker.disconnect(scene.transport)
        with pytest.raises(BrokenError):
            await scene.pause()
        scene.broker.reconnect(scene.transport)
        await asyncio.sleep(5)
        return worker.heard, len(scene.bus._inboxes)

    assert run(scenario()) == ([], 0)


def test_a_command_that_arrives_after_its_expiry_is_refused_and_that_is_its_outcome() -> None:
    """SCENARIOS 55: the envelope says until when it is valid: the deadline."""

    async def scenario() -> tuple[float, FaultCode | None, list[str]]:
        scene = Scene()
        (worker,) = await scene.add(1)
        began_at = scene.clock.now()
        # Slower than the deadline: the command and everything else takes 2.7 s to arrive.
        scene.transport.faults = Faults(delay_s=(2.7, 2.7), only="dyn.>")
        got = await scene.pause(limits=Limits(ack_s=2.0, stall_s=2.0, deadline_s=2.5))
        await asyncio.sleep(10)
        why = got[worker.id].why
        return worker.heard[0].expires_at - began_at, None if why is None else why.code, worker.runs

    assert run(scenario()) == (2.5, FaultCode.EXPIRED, [])


def test_a_worker_restarted_meanwhile_is_lost() -> None:
    """Its answer carries another boot id than the registry knows."""

    async def scenario() -> FaultCode:
        scene = Scene()
        (worker,) = await scene.add(1, boot_id="boot-2")
        got = await scene.pause(boots={worker.id: "boot-1"})
        return code_of(got[worker.id])

    assert run(scenario()) is FaultCode.WORKER_LOST


def test_a_reported_loss_ends_the_wait_for_that_worker_only() -> None:
    """Nobody waits for the dead; the fan-out's listener is gone afterwards."""

    async def scenario() -> tuple[FaultCode, bool, list[tuple[str, float]], int]:
        scene = Scene()
        dead, alive = await scene.add(2, takes_s=4.0)
        losses = Losses()
        asyncio.get_running_loop().call_later(1.0, losses.report, dead.id, "said goodbye")
        outcomes: list[tuple[str, float]] = []
        got = await scene.pause(lost=losses, on_outcome=lambda g: outcomes.append((g.worker, now_s())))
        return code_of(got[dead.id]), got[alive.id].is_ok, outcomes, len(losses._listeners)

    assert run(scenario()) == (FaultCode.WORKER_LOST, True, [("backend/1", 1.0), ("backend/2", 4.0)], 0)


def test_cancelling_a_fanout_leaves_nothing_but_the_workers_own_work() -> None:
    """No inbox, no listener, no timer; late answers are counted and dropped."""

    async def scenario() -> tuple[int, int, int, list[str], int]:
        scene = Scene()
        (worker,) = await scene.add(1, takes_s=3.0)
        losses = Losses()
        task = asyncio.ensure_future(scene.pause(lost=losses))
        await asyncio.sleep(1.5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        left = (len(scene.bus._inboxes), len(scene.bus._on_connection), len(losses._listeners))
        await asyncio.sleep(30)
        return *left, worker.runs, scene.bus.num_late_replies

    num_inboxes, num_watchers, num_listeners, runs, num_late = run(scenario())
    assert (num_inboxes, num_watchers, num_listeners) == (0, 0, 0)
    assert runs == ["op"]
    assert num_late == 2


def test_closing_the_bus_ends_a_fanout_with_closed_error() -> None:
    """It doesn't wait for its deadline."""

    async def scenario() -> float:
        scene = Scene()
        await scene.add(1, takes_s=10.0)
        task = asyncio.ensure_future(scene.pause())
        await asyncio.sleep(1)
        await scene.bus.aclose()
        with pytest.raises(ClosedError):
            await task
        return now_s()

    assert run(scenario()) == 1.0


def test_an_undecodable_answer_is_counted_and_harms_nobody() -> None:
    """The real answer behind it counts."""

    async def scenario() -> tuple[bool, int]:
        scene = Scene()
        (worker,) = await scene.add(1, takes_s=1.0)
        garbler = scene.broker.connect("garbler")
        garbler.subscribe("dyn.>", lambda m: garbler.publish(f"{m.reply}.1", b"{not json"))
        await garbler.barrier(1)
        got = await scene.pause()
        await asyncio.sleep(1)
        return got[worker.id].is_ok, scene.bus.num_bad_messages

    assert run(scenario()) == (True, 1)


def test_a_raising_callback_does_not_keep_the_outcome_from_counting(caplog: pytest.LogCaptureFixture) -> None:
    """The transport logs it; the gather goes on."""

    async def scenario() -> tuple[bool, float]:
        scene = Scene()
        (worker,) = await scene.add(1)

        def bad(worker: WorkerId, answer: WorkerAnswer) -> None:
            raise ValueError("boom")

        got = await scene.pause(on_answer=bad)
        return got[worker.id].is_ok, now_s()

    assert run(scenario()) == (True, 0.0)
    assert "boom" in caplog.text


@pytest.mark.parametrize("seed", range(12))
def test_on_a_lossy_bus_every_worker_has_one_true_outcome_and_runs_at_most_once(seed: int) -> None:
    """Drops, repeats, delays and reordering by seed: what is reported ok was done, what was not begun wasn't."""
    script: list[Callable[[ScriptedWorker], None]] = [
        lambda w: setattr(w, "takes_s", 2.0),
        lambda w: setattr(w, "takes_s", 40.0),
        lambda w: setattr(w, "takes_s", 0.0),
    ]

    async def scenario() -> None:
        scene = Scene(seed=seed)
        await scene.add(30)
        for number, worker in enumerate(scene.workers):
            script[number % 3](worker)
            scene.transport_of(worker).faults = Faults(drop=0.25, duplicate=0.2, reorder=0.2, delay_s=(0.0, 0.3))
        got = await scene.pause()
        assert now_s() <= LIMITS.deadline_s + 2 * SETTLE_GRACE_S
        assert list(got) == [w.id for w in scene.workers]
        for worker in scene.workers:
            gathered = got[worker.id]
            assert (gathered.result is None) != (gathered.fault is None)
            assert worker.runs in ([], ["op"])
            if gathered.is_ok:
                assert "op" in worker.results
            if gathered.fault is not None and gathered.fault.detail.get("settled") == "not_begun":
                assert worker.runs == []
        assert sum(g.is_ok for g in got.values()) >= 15

    run(scenario())


def test_a_member_that_cannot_be_addressed_costs_the_others_nothing() -> None:
    """A reserved component, a bad id: their own outcome says so, and everybody else is paused."""

    async def scenario() -> tuple[bool, list[str]]:
        scene = Scene()
        (good,) = await scene.add(1)
        bad = [WorkerId("controller/9"), WorkerId("controller/8"), WorkerId("backend/x")]
        got = await scene.pause(members=[*bad, good.id])
        return got[good.id].is_ok, [str(got[b].fault and got[b].fault.detail.get("settled")) for b in bad]  # type: ignore[union-attr]

    assert run(scenario()) == (True, ["not_begun"] * 3)
