"""Outcomes by op_id, bounded."""

import pytest

from rlbus.schemas import (
    AbortRequest,
    Command,
    CommandBody,
    FlushCache,
    GetOutcome,
    OutcomeData,
    PauseGeneration,
    PutManifest,
    RenewLease,
    Result,
    ResultStatus,
)
from rlbus.transfer.manifest import pages
from rlbus.workers.engines.fake import DEFAULT_TENSORS
from rlbus.workers.journal import MAX_ENDED, MAX_REPLIES, Journal, digest_of
from rlbus.workers.testing import PAGE_BYTES, Rig, on_worker

pytestmark = pytest.mark.unit


def command(op_id: str, body: CommandBody | None = None) -> Command:
    """A flush, or another one."""
    return Command(op_id=op_id, term=1, expires_at=1.0, body=FlushCache() if body is None else body)


def result(op_id: str) -> Result:
    """Its result."""
    return Result(op_id=op_id, component="c", instance_id="1", boot_id="b", status=ResultStatus.OK)


def test_oldest_ended_op_is_forgotten_and_a_running_one_never() -> None:
    """The bound is on ended ops alone."""
    journal = Journal(max_ended=2)
    running = journal.begin(command("running"), None, 0.0)
    for op_id in ("a", "b", "c"):
        journal.end(journal.begin(command(op_id), None, 0.0), result(op_id))
    assert journal.find("a") is None
    found = journal.find("c")
    assert found is not None
    assert found.result == result("c")
    assert journal.find("running") is running
    assert journal.running == (running,)


@pytest.mark.parametrize(
    "body",
    [AbortRequest(), RenewLease(owner="o", lease_s=1.0), PutManifest(page=pages(DEFAULT_TENSORS, PAGE_BYTES)[0])],
)
def test_ops_beside_mutations_never_push_out_the_outcome_of_one(body: CommandBody) -> None:
    """There may be one for each request; theirs are bounded, too."""
    journal = Journal(max_ended=2)
    journal.end(journal.begin(command("mutation"), None, 0.0), result("mutation"))
    for op_id in ("a", "b", "c"):
        journal.end(journal.begin(command(op_id, body), None, 0.0), result(op_id))
    assert [journal.find(op_id) is not None for op_id in ("mutation", "a", "b", "c")] == [True, False, True, True]


def test_outcome_is_told_and_a_repeat_joins_it_however_many_requests_were_aborted_meanwhile() -> None:
    """`unknown_op` would say that the worker never got the command, and the repeat would run again."""

    async def scenario(rig: Rig) -> None:
        await rig.send(FlushCache(), op_id="f")
        for _ in range(MAX_ENDED + 1):
            await rig.send(AbortRequest(request_ids=("r",)))
        outcome = (await rig.send(GetOutcome(of_op_id="f"))).data
        assert isinstance(outcome, OutcomeData)
        assert (outcome.running, outcome.status) == (False, ResultStatus.OK)
        assert (await rig.send(FlushCache(), op_id="f")).status is ResultStatus.OK
        assert rig.engine.calls.count("flush_cache") == 1

    on_worker(scenario)


def test_refused_op_leaves_no_record() -> None:
    """It may be tried again under the same op_id."""
    journal = Journal()
    journal.forget(journal.begin(command("a"), None, 0.0))
    assert journal.find("a") is None


def test_reply_addresses_are_kept_once_each_and_bounded() -> None:
    """One more than fit is said to be too many."""
    record = Journal().begin(command("a"), "r0", 0.0)
    assert record.add_reply("r0")
    assert record.add_reply(None)
    assert [record.add_reply(f"r{n}") for n in range(1, MAX_REPLIES + 1)] == [True] * (MAX_REPLIES - 1) + [False]
    assert record.replies == [f"r{n}" for n in range(MAX_REPLIES)]


def test_repeat_is_told_from_another_command_by_its_body() -> None:
    """Equal bodies have one digest in every process, different ones don't."""
    record = Journal().begin(command("a"), None, 0.0)
    assert record.digest == digest_of(FlushCache()) == "ee54941460f2cbad"
    assert record.digest != digest_of(PauseGeneration())
