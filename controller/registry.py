"""Who is in the fleet, as announcements, goodbyes and time tell it. Pure: no I/O, the time is passed in.

Invariants: a member is known by (component, instance id); a newer boot replaces an older one (which comes back
if it lives and the newer one ends, see `boots`), and within a boot a larger `seq` wins; liveness follows from the
member's own heartbeat interval; `admitted` is derived here and set nowhere. A silence that everybody shared because
*we* were disconnected or stood still kills nobody: ages restart.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from rlbus.controller import boots
from rlbus.controller.boots import OldBoot
from rlbus.controller.liveness import (
    DEAD_INTERVALS,
    SUSPECT_INTERVALS,
    excused_s,
    interval_of,
    liveness_of,
    stood_still,
)
from rlbus.schemas import (
    WHOLE,
    Announcement,
    Descriptor,
    Generation,
    Goodbye,
    Liveness,
    Target,
    Version,
    WeightsState,
    WorkerId,
    WorkerMessage,
    WorkerStatus,
    worker_id,
)

# Members kept, dead ones included. Source: DESIGN section 4 names 10,000 workers.
MAX_MEMBERS = 20_000
# How long a dead or departed worker stays in view, in seconds.
FORGET_AFTER_S = 3600.0
# A tick that comes later than this many of its intervals says that we stood still ourselves, and heard nobody.
MAX_TICK_INTERVALS = 8
# A term that a worker says it has seen is believed up to here, half of what workers take (rlbus.workers.lifecycle,
# MAX_TERM): one that says nonsense must not use up the terms. Those of leaders are milliseconds, 2000 times smaller.
MAX_SEEN_TERM = 2**52
# Names listed in one message to a person, before "and N more".
MAX_NAMES = 8


@dataclass(frozen=True, slots=True)
class Member:
    """One worker. Times are in the caller's monotonic seconds.

    `heard_at_s` is the last sign of life (or the last reconnect of ours). `gone` says why it is dead or left, None
    while it is neither. `old_boots` are those that were replaced. `is_unheard`: a command found nobody on its subject
    since it announced itself last.
    """

    worker: WorkerId
    descriptor: Descriptor
    status: WorkerStatus
    boot_id: str
    seq: int
    interval_s: float
    heard_at_s: float
    liveness: Liveness = Liveness.ALIVE
    gone: str | None = None
    old_boots: tuple[OldBoot, ...] = ()
    is_unheard: bool = False


@dataclass(frozen=True, slots=True)
class Joined:
    """A worker is there: new, back from the dead, or restarted (`is_reboot`)."""

    member: Member
    is_reboot: bool = False


@dataclass(frozen=True, slots=True)
class Gone:
    """A worker is not there any more, for `reason`."""

    member: Member
    reason: str


@dataclass(frozen=True, slots=True)
class Collided:
    """A worker that was replaced by `member` under the same name lives on beside it, for `reason`."""

    member: Member
    reason: str


@dataclass(frozen=True, slots=True)
class Updated:
    """A known worker said something new about itself, or its liveness changed between alive and suspect."""

    member: Member


Change = Joined | Gone | Collided | Updated


@dataclass(slots=True)
class Registry:
    """The members of one namespace. Not safe for threads; all methods are synchronous and take the time as `now_s`."""

    namespace: str
    # The term of the controller whose registry this is, and how often it calls `tick`, in seconds; None: unknown.
    term: int | None = None
    tick_s: float | None = None
    _members: dict[WorkerId, Member] = field(default_factory=dict)
    # system_url -> workers that claim it, in order of their first claim.
    _urls: dict[str, list[WorkerId]] = field(default_factory=dict)
    _version: Version | None = None
    # Highest version that a rollback left behind: workers that still announce up to it don't raise the fleet's.
    _rolled_back_from: Version | None = None
    _max_epoch: int = 0
    # When the connection was lost; ages stand still from then on. None: connected.
    _cut_at_s: float | None = None
    _ticked_at_s: float | None = None
    # Messages refused here or by `screening`: contradictory, beyond reason, or over MAX_MEMBERS. Only grows.
    num_refused: int = 0
    # Largest term that any worker said it has seen.
    newest_term: int = 0

    @property
    def version(self) -> Version | None:
        """The fleet's version: the highest committed one that was seen, unless a rollback set it back."""
        return self._version

    @property
    def rolled_back_from(self) -> Version | None:
        """The highest version that a rollback left behind, None if there was none since."""
        return self._rolled_back_from

    def restore(self, version: Version, rolled_back_from: Version | None) -> None:
        """What the controller before us knew of the fleet's version; called before anybody is heard."""
        self._version, self._rolled_back_from = version, rolled_back_from

    @property
    def max_epoch(self) -> int:
        """Highest process group epoch that any worker named; a new group must be numbered above it."""
        return self._max_epoch

    def members(self) -> tuple[Member, ...]:
        """Everybody in view, dead ones included, in the order of their names."""
        return tuple(sorted(self._members.values(), key=lambda m: m.worker))

    def get(self, worker: WorkerId) -> Member | None:
        """One member, dead or alive."""
        return self._members.get(worker)

    def components(self) -> tuple[str, ...]:
        """Names of all components in view."""
        return tuple(sorted({m.descriptor.component for m in self._members.values()}))

    def num_in_components(self) -> dict[str, int]:
        """How many workers each component has that aren't gone."""
        counts: dict[str, int] = {}
        for member in self._members.values():
            if member.gone is None:
                counts[member.descriptor.component] = counts.get(member.descriptor.component, 0) + 1
        return counts

    # -- what happens -------------------------------------------------------------------------------------------------

    def hear(self, message: WorkerMessage, now_s: float) -> tuple[Change, ...]:
        """Take a worker's own message; repeats, late and foreign ones change nothing."""
        if isinstance(message, Goodbye):
            return self._hear_goodbye(message)
        if message.descriptor.namespace != self.namespace:
            self.num_refused += 1
            return ()
        known = self._members.get(worker_id(message.descriptor.component, message.descriptor.instance_id))
        if known is None:
            return self._hear_stranger(message, now_s)
        if (old := boots.find(known.old_boots, message.boot_id)) is not None:
            return self._hear_old(known, old, message, now_s)
        if message.boot_id != known.boot_id:
            member = self._place(message, now_s, _replaced(known))
            return (Joined(member, is_reboot=known.gone is None),)
        if known.liveness is Liveness.LEFT or message.seq <= known.seq:
            return ()
        member = self._place(message, now_s, known.old_boots)
        return (Joined(member),) if known.gone is not None else (Updated(member),)

    def learn(self, worker: WorkerId, boot_id: str, status: WorkerStatus, seq: int = 0) -> None:
        """An answer of this boot showed its status; the next announcement after number `seq` replaces it.

        Those up to `seq` were sent before the answer, and may still be under way.
        """
        known = self._members.get(worker)
        if known is not None and known.boot_id == boot_id and known.gone is None:
            self._members[worker] = replace(known, status=status, seq=max(known.seq, seq))

    def unheard(self, worker: WorkerId) -> None:
        """A command found nobody on this worker's subject: it isn't addressed until it announces itself again."""
        known = self._members.get(worker)
        if known is not None and known.gone is None:
            self._members[worker] = replace(known, liveness=Liveness.SUSPECT, is_unheard=True)

    def tick(self, now_s: float) -> tuple[Change, ...]:
        """Let time pass: who turned suspect or dead since the last call. Nobody does while we are disconnected."""
        before_s, self._ticked_at_s = self._ticked_at_s, now_s
        if self._cut_at_s is not None:
            return ()
        limit_s = None if self.tick_s is None else MAX_TICK_INTERVALS * self.tick_s
        if before_s is not None and limit_s is not None and stood_still(before_s, now_s, limit_s):
            self.reconnected(now_s)
        changes: list[Change] = []
        for member in list(self._members.values()):
            age_s = now_s - member.heard_at_s
            if member.gone is not None:
                if age_s > FORGET_AFTER_S:
                    self._forget(member)
                continue
            member = self._tick_rivals(member, now_s, changes)
            liveness = liveness_of(age_s, member.interval_s, excused_s(member.status))
            if liveness is Liveness.ALIVE and member.is_unheard:
                liveness = Liveness.SUSPECT
            if liveness is member.liveness:
                continue
            gone = f"silent for {age_s:.0f} s" if liveness is Liveness.DEAD else None
            changed = replace(member, liveness=liveness, gone=gone)
            self._members[member.worker] = changed
            changes.append(Updated(changed) if gone is None else Gone(changed, gone))
            if gone is not None:
                changes.extend(self._succeed(changed))
        return tuple(changes)

    def disconnected(self, now_s: float) -> None:
        """Our own connection is lost: from now on silence says nothing about anybody."""
        if self._cut_at_s is None:
            self._cut_at_s = now_s

    def reconnected(self, now_s: float) -> None:
        """We are back: everybody who wasn't gone before gets a whole interval anew."""
        self._cut_at_s = None
        for worker, member in self._members.items():
            if member.gone is None:
                old_boots = tuple(replace(boot, heard_at_s=now_s) for boot in member.old_boots)
                liveness = Liveness.SUSPECT if member.is_unheard else Liveness.ALIVE
                self._members[worker] = replace(member, heard_at_s=now_s, liveness=liveness, old_boots=old_boots)

    def committed(self, version: Version) -> None:
        """An op of this controller gave the fleet `version`, also a smaller one than before (a rollback)."""
        if self._version is not None and version < self._version:
            left = self._version if self._rolled_back_from is None else max(self._version, self._rolled_back_from)
            self._rolled_back_from = left
        elif self._rolled_back_from is not None and version > self._rolled_back_from:
            self._rolled_back_from = None
        self._version = version

    def saw_epoch(self, epoch: int) -> None:
        """A group of this number exists or existed."""
        self._max_epoch = max(self._max_epoch, epoch)

    # -- what follows -------------------------------------------------------------------------------------------------

    def conflict(self, member: Member) -> str | None:
        """Why this worker can't be addressed although it lives: there are two of it, or nobody listens, or another one
        had its system_url before (SCENARIOS 25).

        Two workers behind one URL means that HTTP calls for both reach one of them; the first to claim it keeps it.
        """
        if (rival := boots.rival_of(member.old_boots)) is not None:
            return f"two processes announce this instance id (boots {rival.boot_id} and {member.boot_id}); stop one"
        if member.is_unheard:
            return "nobody listened on its subject when it was last sent a command"
        url = member.descriptor.system_url
        if url is None:
            return None
        for worker in self._urls.get(url, ()):
            if worker == member.worker:
                return None
            if self._members[worker].gone is None:
                return f"its system_url {url} is already that of {worker}"
        return None

    def refusal(self, member: Member) -> str | None:
        """Why an op can't address this worker, None if it can."""
        if member.gone is not None:
            return f"{member.liveness.value}: {member.gone}"
        return self.conflict(member)

    def unadmitted(self, member: Member) -> str | None:
        """Why this worker must not be sent rollouts; None: it is admitted."""
        status, weights = member.status, member.status.weights
        if (refusal := self.refusal(member)) is not None:
            return refusal
        if self.term is not None and status.term > self.term:
            return f"refuses this controller: it has seen term {status.term}, ours is {self.term}"
        if member.liveness is not Liveness.ALIVE:
            return f"silent for more than {SUSPECT_INTERVALS:g} of its intervals"
        if status.asleep:
            return f"asleep: {', '.join(status.asleep)}"
        if status.work is not None and status.work.route == "sleep":
            return "falls asleep"
        if status.generation is not Generation.RUNNING:
            owner = f" by {status.pause.owner}" if status.pause is not None else ""
            return f"generation is {status.generation.value}{owner}"
        if weights.state is not WeightsState.CLEAN and not self._is_initial(member):
            return f"weights are {weights.state.value}"
        if status.draft is not None and status.draft.state not in WHOLE:
            return f"the draft model's weights are {status.draft.state.value}"
        if self._version is not None and weights.version != self._version:
            mine = "none" if weights.version is None else str(weights.version)
            return f"version {mine}, the fleet is at {self._version}"
        return None

    def addressable(self, target: Target) -> tuple[Member, ...]:
        """Whom an op on `target` addresses now, in the order of their names: everybody there, without the dead."""
        return tuple(m for m in self.members() if _is_meant(m, target) and self.refusal(m) is None)

    def unaddressable(self, target: Target) -> dict[WorkerId, str]:
        """Workers that `target` names one by one and that can't be addressed, each with the reason."""
        reasons: dict[WorkerId, str] = {}
        for worker in target.workers or ():
            member = self._members.get(worker)
            reason = "never seen" if member is None else self.refusal(member)
            if reason is not None:
                reasons[worker] = reason
        return reasons

    def missing(self, target: Target, *, world_size: int | None, num_workers: int | None) -> str | None:
        """What `target` lacks to have this world size and number of workers, in words; None: it is complete."""
        there = [m for m in self.addressable(target) if m.liveness is Liveness.ALIVE]
        ranks = sum(m.descriptor.world_size for m in there)
        lacks: list[str] = []
        if world_size is not None and ranks < world_size:
            lacks.append(f"world size is {ranks} of {world_size}")
        if num_workers is not None and len(there) < num_workers:
            lacks.append(f"{len(there)} of {num_workers} workers are there")
        absent = self.unaddressable(target)
        if absent:
            lacks.append("missing " + list_names(f"{w} ({why})" for w, why in absent.items()))
        if not lacks:
            return None
        lacks.append("there: " + list_names(f"{m.worker} ({m.descriptor.world_size})" for m in there))
        names = target.workers or ()
        alive = {m.worker for m in there}
        out = [m for m in self.members() if _is_meant(m, target) and m.worker not in alive and m.worker not in names]
        if out:
            lacks.append("not counted: " + list_names(f"{m.worker} ({self.refusal(m) or 'suspect'})" for m in out))
        return "; ".join(lacks)

    def age_s(self, member: Member, now_s: float) -> float:
        """Seconds since the member's last sign of life; they stand still while we are disconnected ourselves."""
        now_s = now_s if self._cut_at_s is None else self._cut_at_s
        return max(0.0, now_s - member.heard_at_s)

    # -- inside -------------------------------------------------------------------------------------------------------

    def _is_initial(self, member: Member) -> bool:
        """Whether nobody has updated anything yet, so that what the worker was started with is the fleet's weights."""
        weights = member.status.weights
        return self._version is None and weights.state is WeightsState.UNKNOWN and weights.last_good is None

    def _hear_old(self, known: Member, old: OldBoot, message: Announcement, now_s: float) -> tuple[Change, ...]:
        """A boot that was replaced announces itself: late, or it lives on beside its successor, or it is left alone."""
        if old.has_left or message.seq <= old.seq:
            return ()
        if known.gone is not None:
            return (Joined(self._place(message, now_s, boots.without(_replaced(known), old.boot_id))),)
        member = replace(known, old_boots=boots.put(known.old_boots, boots.heard(old, message, now_s)))
        self._members[known.worker] = member
        if boots.rival_of(known.old_boots) is not None or boots.rival_of(member.old_boots) is None:
            return ()
        return (Collided(member, self.conflict(member) or ""),)

    def _tick_rivals(self, member: Member, now_s: float, changes: list[Change]) -> Member:
        """A rival that fell silent is none any more."""
        for boot in member.old_boots:
            if boot.rival is None or now_s - boot.heard_at_s < DEAD_INTERVALS * interval_of(boot.rival):
                continue
            member = replace(member, old_boots=boots.put(member.old_boots, boots.silent(boot)))
            self._members[member.worker] = member
            changes.append(Updated(member))
        return member

    def _succeed(self, member: Member) -> tuple[Change, ...]:
        """This member is gone; a rival that still lives is the worker again."""
        rival = boots.rival_of(member.old_boots)
        if rival is None or rival.said is None:
            return ()
        return (Joined(self._place(rival.said, rival.heard_at_s, boots.without(_replaced(member), rival.boot_id))),)

    def _hear_goodbye(self, message: Goodbye) -> tuple[Change, ...]:
        known = self._members.get(worker_id(message.component, message.instance_id))
        old = None if known is None else boots.find(known.old_boots, message.boot_id)
        if known is not None and old is not None:
            member = replace(known, old_boots=boots.put(known.old_boots, boots.silent(old, has_left=True)))
            self._members[known.worker] = member
            return () if old.rival is None else (Updated(member),)
        if known is None or known.boot_id != message.boot_id or known.liveness is Liveness.LEFT:
            return ()
        member = replace(known, liveness=Liveness.LEFT, gone=message.reason)
        self._members[known.worker] = member
        if known.gone is not None:
            return ()
        return (Gone(member, message.reason), *self._succeed(member))

    def _hear_stranger(self, message: Announcement, now_s: float) -> tuple[Change, ...]:
        if len(self._members) >= MAX_MEMBERS:
            gone = [m for m in self._members.values() if m.gone is not None]
            if not gone:
                self.num_refused += 1
                return ()
            self._forget(min(gone, key=lambda m: m.heard_at_s))
        return (Joined(self._place(message, now_s, ())),)

    def _place(self, message: Announcement, now_s: float, old_boots: tuple[OldBoot, ...]) -> Member:
        worker = worker_id(message.descriptor.component, message.descriptor.instance_id)
        member = Member(
            worker=worker,
            descriptor=message.descriptor,
            status=message.status,
            boot_id=message.boot_id,
            seq=message.seq,
            interval_s=interval_of(message),
            heard_at_s=now_s,
            old_boots=old_boots,
        )
        self._claim_url(self._members.get(worker), member)
        self._members[worker] = member
        if message.status.term <= MAX_SEEN_TERM:
            self.newest_term = max(self.newest_term, message.status.term)
        if message.status.epoch is not None:
            self.saw_epoch(message.status.epoch)
        weights = message.status.weights
        if weights.state is WeightsState.CLEAN and weights.version is not None:
            self._raise_version(weights.version)
        return member

    def _raise_version(self, seen: Version) -> None:
        if self._rolled_back_from is not None and seen <= self._rolled_back_from:
            return
        if self._version is None or seen > self._version:
            self._version = seen
            self._rolled_back_from = None

    def _claim_url(self, before: Member | None, now: Member) -> None:
        old, new = None if before is None else before.descriptor.system_url, now.descriptor.system_url
        if before is not None and old != new:
            self._release_url(before)
        if new is not None and now.worker not in self._urls.setdefault(new, []):
            self._urls[new].append(now.worker)

    def _release_url(self, member: Member) -> None:
        url = member.descriptor.system_url
        if url is None:
            return
        claims = self._urls.get(url, [])
        if member.worker in claims:
            claims.remove(member.worker)
        if not claims:
            self._urls.pop(url, None)

    def _forget(self, member: Member) -> None:
        self._release_url(member)
        del self._members[member.worker]


def _replaced(member: Member) -> tuple[OldBoot, ...]:
    """The old boots of whoever replaces this member."""
    return boots.put(member.old_boots, OldBoot(member.boot_id, member.seq, has_left=member.liveness is Liveness.LEFT))


def _is_meant(member: Member, target: Target) -> bool:
    if target.components is None and target.workers is None:
        return True
    in_components = target.components is not None and member.descriptor.component in target.components
    return in_components or (target.workers is not None and member.worker in target.workers)


def list_names(names: Iterable[str]) -> str:
    """For a message to a person: at most MAX_NAMES of them, and how many more there are."""
    listed = list(names)
    if not listed:
        return "nobody"
    tail = f" and {len(listed) - MAX_NAMES} more" if len(listed) > MAX_NAMES else ""
    return ", ".join(listed[:MAX_NAMES]) + tail
