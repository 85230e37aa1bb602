"""The fleet as it is told to people and clients: in one message, or in pages that fit into one each.

Invariants: members are in the order of their names, and a page names the last one of it, so that whoever asks for
all pages gets everybody who stays, once, whoever comes or goes meanwhile; a page is never empty while members are left.
"""

import asyncio
import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from rlbus.bus import Bus
from rlbus.codec import MAX_MESSAGE_BYTES
from rlbus.controller.registry import Member, Registry
from rlbus.schemas import FleetView, MemberView, WorkerId

_encoder = msgspec.json.Encoder()


@dataclass(frozen=True, slots=True)
class Head:
    """What the controller says of itself: its term, the epoch of the group that stands, the op that runs."""

    term: int
    epoch: int | None
    op_id: str | None


class Viewing:
    """Answers who asks for the fleet. `head` is asked each time; `explain` adds what is done about its members."""

    def __init__(
        self, bus: Bus, registry: Registry, head: Callable[[], Head], explain: Callable[[FleetView], FleetView]
    ) -> None:
        self._bus = bus
        self._registry = registry
        self._head = head
        self._explain = explain

    def whole(self) -> FleetView:
        """Everybody, whatever a message takes."""
        return self._of(self._registry.members())

    def page(self, limit: int | None, after: WorkerId | None = None) -> FleetView:
        """At most `limit` members whose names come after `after`, as many as fit; None: everybody, fit or not.

        The adapters of the fleet are on the first page.
        """
        if limit is None:
            return self.whole()
        limit = max(1, limit)
        # One more than asked for says whether there is a next page.
        view = self._of(members_after(self._registry.members(), after)[: limit + 1])
        if after is not None:
            view = msgspec.structs.replace(view, loras=())
        # Half of a message, as of a manifest: what is added later (a note, a longer status) fits as well.
        return page_of(view, limit, min(MAX_MESSAGE_BYTES, self._bus.transport.max_payload_bytes) // 2)

    def _of(self, members: Sequence[Member]) -> FleetView:
        return self._explain(view_of(self._registry, members, asyncio.get_running_loop().time(), self._head()))


def view_of(registry: Registry, members: Sequence[Member], now_s: float, head: Head) -> FleetView:
    """These members of a fleet, each with what the registry makes of it. Pure."""
    return FleetView(
        namespace=registry.namespace,
        term=head.term,
        version=registry.version,
        epoch=head.epoch,
        op_id=head.op_id,
        members=tuple(_member_view(registry, m, now_s) for m in members),
    )


def members_after(members: Sequence[Member], after: str | None) -> Sequence[Member]:
    """Those of `members`, which are in order, whose names come after that one, whether or not it is there. Pure."""
    return members if after is None else members[bisect.bisect_right(members, after, key=lambda m: m.worker) :]


def page_of(view: FleetView, limit: int, limit_bytes: int) -> FleetView:
    """The first members of `view`, at most `limit` and as many as stay below `limit_bytes`, but at least one. Pure."""
    num_bytes = len(_encoder.encode(msgspec.structs.replace(view, members=())))
    for num, member in enumerate(view.members):
        num_bytes += len(_encoder.encode(member)) + 1
        if num == limit or (num > 0 and num_bytes > limit_bytes):
            return msgspec.structs.replace(view, members=view.members[:num], next=view.members[num - 1].worker)
    return view


def _member_view(registry: Registry, member: Member, now_s: float) -> MemberView:
    reason = registry.unadmitted(member)
    return MemberView(
        worker=member.worker,
        liveness=member.liveness,
        admitted=reason is None,
        descriptor=member.descriptor,
        status=member.status,
        boot_id=member.boot_id,
        age_s=registry.age_s(member, now_s),
        reason=reason,
    )
