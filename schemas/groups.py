"""Plan of one process group: who has which ranks, and where they meet."""

import msgspec

from rlbus.schemas.base import Wire
from rlbus.schemas.ids import InstanceId, OpId, Token


class RankSpan(Wire, frozen=True, kw_only=True):
    """The consecutive ranks of one worker: `first`, ..., `first + num_ranks - 1`. num_ranks is its world size."""

    component: Token
    instance_id: InstanceId
    first: int
    num_ranks: int


class Rendezvous(Wire, frozen=True, kw_only=True):
    """Where the members of a group meet: a TCP store that the trainer bound on port 0, and keeps open.

    `prefix` separates the keys of this group from those of earlier ones on the same store.
    """

    host: str
    port: int
    prefix: str


class GroupPlan(Wire, frozen=True, kw_only=True):
    """One process group. The trainer's ranks come first (0 sends), then the spans without gap or overlap.

    `epoch` numbers the group within the controller's memory and only grows; a member refuses data of another.
    `backend` is "gloo" or "nccl". `timeout_s` bounds the forming and each collective.
    """

    epoch: int
    group_id: OpId
    backend: str
    num_trainer_ranks: int
    world_size: int
    spans: tuple[RankSpan, ...]
    rendezvous: Rendezvous
    bucket_bytes: int
    timeout_s: float = msgspec.field(default=60.0)
