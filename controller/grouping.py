"""When a process group can be used again, and what a new one looks like. Pure."""

from collections.abc import Sequence

from rlbus.controller.op_ids import derive
from rlbus.controller.spans import group_size, rank_spans
from rlbus.controller.update_state import Candidate, Group, Plan
from rlbus.schemas import GroupPlan, UpdateWeights


def fits(group: Group, request: UpdateWeights, crew: Sequence[Candidate]) -> bool:
    """Whether `group` has exactly this trainer and these workers, in the same processes and sizes.

    Somebody who is back counts as much as somebody who left (SCENARIOS 59). `bucket_bytes` may differ: every transfer
    names its own.
    """
    plan = group.plan
    return (
        group.sender_id == request.sender_id
        and plan.backend == request.backend
        and plan.num_trainer_ranks == request.num_trainer_ranks
        and dict(group.boots) == {c.worker: c.boot_id for c in crew}
        and plan.spans == rank_spans([(c.worker, c.world_size) for c in crew], request.num_trainer_ranks)
    )


def new_plan(plan: Plan, crew: Sequence[Candidate]) -> GroupPlan:
    """The group of this update over `crew`, at the next epoch."""
    request = plan.request
    spans = rank_spans([(c.worker, c.world_size) for c in crew], request.num_trainer_ranks)
    return GroupPlan(
        epoch=plan.next_epoch,
        group_id=derive(request.op_id, f"group-{plan.next_epoch}"),
        backend=request.backend,
        num_trainer_ranks=request.num_trainer_ranks,
        world_size=group_size(spans, request.num_trainer_ranks),
        spans=spans,
        rendezvous=request.rendezvous,
        bucket_bytes=request.bucket_bytes,
        timeout_s=plan.group_timeout_s,
    )
