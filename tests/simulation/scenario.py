"""What one simulated run does, drawn from its seed: the fleet, what is asked of it, and what goes wrong. Pure.

Swarm testing: each kind of fault is switched on or off per run, so that many runs have few kinds and go deep instead of
all of them dying of everything at once.
"""

import random
from dataclasses import dataclass
from typing import Any

from rlbus._memory import NO_FAULTS
from rlbus.schemas import OnFailure, SnapshotKind
from rlbus.testing import Faults

# Virtual seconds in which ops and faults happen.
ACTIVE_S = 36.0
# Bound of every party's clock error, in seconds, to either side.
MAX_SKEW_S = 0.4
# Heartbeat of the simulated workers, in seconds: a dead one is noticed within one run.
HEARTBEAT_S = 2.0
# How late messages of a party that lags may be, in seconds: later than most commands are valid.
MAX_LAG_S = 9.0
# Part of the runs in which a kind of fault is possible at all.
PART_PER_KIND = 0.3
# Kinds in which a process stands still; such runs need a loop that asks whether it does.
STOPPING_KINDS = frozenset({"stop", "controller-stop"})

KINDS = (
    "drop",
    "delay",
    "duplicate",
    "reorder",
    "partition",
    "lag",
    "disconnect",
    "blackout",
    "stop",
    "worker-crash",
    "worker-restart",
    "controller-crash",
    "controller-restart",
    "controller-stop",
    "controller-cut",
    "controller-lag",
    "store-drop",
    "store-cut",
    "store-blackout",
    "trainer-crash",
    "trainer-zombie",
    "slow-verbs",
    "failing-verbs",
    "hanging-verbs",
    "failing-transfers",
    "hanging-transfers",
    "lying-transfers",
    "dying-engines",
)
# Kinds that happen at a moment, and how many of them at most per run.
_MOMENTS = {
    "partition": 3,
    "lag": 3,
    "disconnect": 3,
    "blackout": 1,
    "stop": 3,
    "worker-crash": 3,
    "worker-restart": 2,
    "controller-crash": 2,
    "controller-restart": 2,
    "controller-stop": 2,
    "controller-cut": 2,
    "controller-lag": 2,
    "store-cut": 2,
    "store-blackout": 1,
    "trainer-crash": 2,
    "trainer-zombie": 1,
}
# Part of the runs whose workers remember over the end of their process what they were told.
LEDGER_PART = 0.7
# The longest that each may last, in seconds; 4 s for those that aren't listed.
_LONG_S = {
    "lag": 10.0,
    "trainer-zombie": 10.0,
    "partition": 12.0,
    "disconnect": 12.0,
    "blackout": 10.0,
    "stop": 12.0,
    "controller-stop": 10.0,
    "controller-cut": 10.0,
    "store-cut": 8.0,
    "store-blackout": 8.0,
}


@dataclass(frozen=True, slots=True)
class Ask:
    """Something asked of the fleet at a time. `options` are keyword arguments of the client's or trainer's method."""

    at_s: float
    verb: str
    options: dict[str, Any]
    # The caller loses interest after so many seconds (None: it waits for the end).
    cancel_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class Mishap:
    """Something that goes wrong at a time, with `whom` (a number that the world maps to a party), for a while."""

    at_s: float
    kind: str
    whom: int
    for_s: float


@dataclass(frozen=True, slots=True)
class Scenario:
    """One run. `sizes` are the world sizes of the workers; `skews_s` the clock errors, in the order of the parties."""

    seed: int
    sizes: tuple[int, ...]
    kinds: frozenset[str]
    faults: Faults
    # Of the controllers' connections to the store.
    store_faults: Faults
    num_controllers: int
    snapshot: SnapshotKind
    skews_s: tuple[float, ...]
    asks: tuple[Ask, ...]
    mishaps: tuple[Mishap, ...]
    send_s: float
    # Chance per engine call that a fault of a kind that is possible happens.
    engine_chance: float
    # Whether workers have a file of what they were told, and come back as themselves.
    has_ledgers: bool

    @property
    def stops(self) -> bool:
        """Whether some process may stand still for a while."""
        return not self.kinds.isdisjoint(STOPPING_KINDS)

    def has(self, kind: str) -> bool:
        """Whether this kind of fault is possible."""
        return kind in self.kinds


def draw(seed: int) -> Scenario:
    """The run of a seed."""
    rng = random.Random(f"rlbus-simulation/{seed}")
    kinds = frozenset(k for k in KINDS if rng.random() < PART_PER_KIND)
    sizes = tuple(rng.choice((1, 1, 1, 2)) for _ in range(rng.choice((2, 2, 3, 3, 4))))
    return Scenario(
        seed=seed,
        sizes=sizes,
        kinds=kinds,
        faults=_draw_faults(rng, kinds),
        store_faults=_draw_store_faults(rng, kinds),
        num_controllers=rng.choice((1, 2, 2)),
        snapshot=rng.choice((SnapshotKind.MEMORY, SnapshotKind.MEMORY, SnapshotKind.DISK, SnapshotKind.NONE)),
        skews_s=tuple(rng.uniform(-MAX_SKEW_S, MAX_SKEW_S) for _ in range(len(sizes) + 4)),
        asks=_draw_asks(rng),
        mishaps=_draw_mishaps(rng, kinds),
        send_s=rng.choice((0.0, 0.1, 0.5, 2.0)),
        engine_chance=rng.choice((0.03, 0.1, 0.25)),
        has_ledgers=rng.random() < LEDGER_PART,
    )


def _draw_faults(rng: random.Random, kinds: frozenset[str]) -> Faults:
    faults = Faults(
        drop=rng.choice((0.01, 0.05, 0.15)) if "drop" in kinds else 0.0,
        duplicate=rng.choice((0.05, 0.3)) if "duplicate" in kinds else 0.0,
        reorder=rng.choice((0.05, 0.3)) if "reorder" in kinds else 0.0,
        delay_s=(0.0, rng.choice((0.01, 0.1, 0.6))) if "delay" in kinds else (0.0, 0.0),
    )
    return NO_FAULTS if faults == NO_FAULTS else faults


def _draw_store_faults(rng: random.Random, kinds: frozenset[str]) -> Faults:
    """Calls of the store that are lost on their way, or done and not confirmed. Too many, and nobody ever leads."""
    delay_s = (0.0, rng.choice((0.01, 0.1, 0.3))) if "delay" in kinds else (0.0, 0.0)
    faults = Faults(drop=rng.choice((0.02, 0.1, 0.3)) if "store-drop" in kinds else 0.0, delay_s=delay_s)
    return NO_FAULTS if faults == NO_FAULTS else faults


def _draw_asks(rng: random.Random) -> tuple[Ask, ...]:
    asks: list[Ask] = []
    at_s = rng.uniform(0.5, 2.0)
    while at_s < ACTIVE_S:
        asks.append(_draw_ask(rng, at_s))
        at_s += rng.choice((0.3, 2.0, 5.0, 8.0)) * rng.uniform(0.5, 1.5)
    return tuple(asks)


def _draw_ask(rng: random.Random, at_s: float) -> Ask:
    verb = rng.choices(
        ("update", "pause", "resume", "flush", "abort", "versions", "reload", "repeat"),
        weights=(8, 2, 3, 1, 1, 1, 1, 1),
    )[0]
    options: dict[str, Any] = {"deadline_s": rng.choice((2.0, 6.0, 12.0))}
    if verb == "pause":
        # None: until the operator resumes.
        options["lease_s"] = rng.choice((None, 2.0, 8.0))
    if verb in ("update", "pause", "reload"):
        options["mode" if verb == "pause" else "pause_mode"] = rng.choice(("keep", "keep", "wait", "abort"))
    if verb == "update":
        options |= {
            "stall_s": rng.choice((2.0, 5.0)),
            "reset_prefix_cache": rng.random() < 0.7,
            "require": rng.choice((None, None, None, 1)),
            "on_failure": rng.choice((OnFailure.RETRY, OnFailure.RETRY, OnFailure.STOP)),
            "goal": rng.choices(("next", "same", "older", "rollback"), weights=(12, 2, 2, 1))[0],
        }
    return Ask(at_s, verb, options, rng.uniform(0.1, 5.0) if rng.random() < 0.1 else None)


def _draw_mishaps(rng: random.Random, kinds: frozenset[str]) -> tuple[Mishap, ...]:
    mishaps = [
        Mishap(rng.uniform(0.5, ACTIVE_S), kind, rng.randrange(1000), rng.uniform(0.2, _LONG_S.get(kind, 4.0)))
        for kind, most in _MOMENTS.items()
        if kind in kinds
        for _ in range(rng.randint(1, most))
    ]
    return tuple(sorted(mishaps, key=lambda m: m.at_s))
