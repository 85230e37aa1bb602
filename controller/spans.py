"""Which ranks of a process group are whose. Pure.

Ranks are never had by dividing a total: each worker takes as many as its own world size, in the order given, after the
trainer's (SCENARIOS 17).
"""

from collections.abc import Sequence

from rlbus.errors import ConfigError
from rlbus.schemas import (
    Fault,
    FaultCode,
    GroupPlan,
    JoinedData,
    RankSpan,
    ResultData,
    WorkerId,
    split_worker_id,
)


def rank_spans(sizes: Sequence[tuple[WorkerId, int]], num_trainer_ranks: int) -> tuple[RankSpan, ...]:
    """One span per worker, in the order of `sizes` (worker, world size), from `num_trainer_ranks` on.

    Raises:
        ConfigError: a world size or the trainer's share below 1, or a worker that is named twice.
    """
    if num_trainer_ranks < 1:
        raise ConfigError("num_trainer_ranks", num_trainer_ranks, "a trainer has at least one rank")
    if len({worker for worker, _ in sizes}) != len(sizes):
        raise ConfigError("workers", [worker for worker, _ in sizes], "a worker is named twice")
    spans: list[RankSpan] = []
    first = num_trainer_ranks
    for worker, size in sizes:
        if size < 1:
            raise ConfigError(f"world size of {worker}", size, "a worker has at least one rank")
        component, instance_id = split_worker_id(worker)
        spans.append(RankSpan(component=component, instance_id=instance_id, first=first, num_ranks=size))
        first += size
    return tuple(spans)


def group_size(spans: Sequence[RankSpan], num_trainer_ranks: int) -> int:
    """The number of ranks in the group: the trainer's and everybody's."""
    return num_trainer_ranks + sum(span.num_ranks for span in spans)


def check_joined(plan: GroupPlan, worker: WorkerId, span: RankSpan | None, data: ResultData | None) -> Fault | None:
    """Whether what a worker says of the group it joined is what was planned for it (`span`); the fault if not.

    Asked before any tensor is sent: a worker that counts otherwise would hang everybody, or take another's bytes.
    """
    if span is None:
        return _fault(worker, f"it isn't in the plan of group {plan.epoch}")
    if not isinstance(data, JoinedData):
        return _fault(worker, "it didn't say which ranks it has")
    if data.epoch != plan.epoch:
        return _fault(worker, f"it joined group {data.epoch}, not {plan.epoch}")
    planned = tuple(range(span.first, span.first + span.num_ranks))
    if data.ranks != planned:
        return _fault(worker, f"it has ranks {list(data.ranks)}, planned were {list(planned)}")
    if data.world_size != plan.world_size:
        return _fault(worker, f"it sees {data.world_size} ranks in the group, planned were {plan.world_size}")
    return None


def _fault(worker: WorkerId, problem: str) -> Fault:
    return Fault(code=FaultCode.GROUP_FAILED, message=f"{worker}: {problem}", detail={"worker": worker})
