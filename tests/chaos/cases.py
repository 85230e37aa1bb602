"""The faults, as data: what is struck, how, in which phase of an update, and what has to come of it within which bound.

Every bound is in seconds and counts from the blow. Beyond it come what nobody can hurry: one transfer, as measured just
before on the same fleet, and the start of a process that somebody has to start again.
"""

import enum
from collections.abc import Iterator
from dataclasses import dataclass


class Target(enum.StrEnum):
    """What is struck."""

    WORKER = "worker"  # the process that serves: agent and engine
    ENGINE = "engine"  # a process of the engine under its agent: a rank of torch, vLLM's EngineCore
    TRAINER = "trainer"
    CONTROLLER = "controller"  # the one that leads; another stands by
    SERVER = "nats-server"


class Blow(enum.StrEnum):
    """How."""

    KILL = "SIGKILL"
    STOP = "SIGSTOP"


class Phase(enum.StrEnum):
    """When: where the update stands as the blow falls."""

    IDLE = "idle"  # no update runs
    BEFORE_PAUSE = "before pause"  # it fits, and the group stands
    PAUSED = "paused"  # no byte was sent yet
    MID_BROADCAST = "mid-broadcast"  # some bytes are there, the others are held back by the trainer's source
    BEFORE_COMMIT = "before commit"  # everything arrived and agrees
    BEFORE_RESUME = "before resume"  # committed, not let go yet


UPDATE_PHASES = tuple(phase for phase in Phase if phase is not Phase.IDLE)

# The command before which the controller is held until the blow has fallen; mid-broadcast the trainer's source waits.
HELD_BEFORE = {
    Phase.BEFORE_PAUSE: "PauseGeneration",
    Phase.PAUSED: "ReceiveWeights",
    Phase.BEFORE_COMMIT: "CommitWeights",
    Phase.BEFORE_RESUME: "ResumeGeneration",
}
# The phase of the update that it is in as the blow falls, by the controller's own word.
STRUCK_IN = {
    Phase.IDLE: "none",
    Phase.BEFORE_PAUSE: "pause",
    Phase.PAUSED: "transfer",
    Phase.MID_BROADCAST: "transfer",
    Phase.BEFORE_COMMIT: "commit",
    Phase.BEFORE_RESUME: "resume",
}

# Source of the bounds: issue 3, section 3. From the loss of a member until the others serve; and from when the lost one
# is on the bus again until it is admitted.
RECOVERY_S = 5.0
# Until an engine's death is seen by what supervises it. Source: issue 3, section 1.7.
SEEN_S = 2.0
# Until a standby answers in the place of a leader that died.
FAILOVER_S = 5.0
# No word of the controller for so long: somebody stands still whom the case doesn't strike. A lease ends then.
STILL_S = 2.0
# What a silence costs before it is taken for a loss: of a worker in an op (rlbus.controller.line.ACK_S), of a trainer
# that joins (rlbus.controller.sender_life.JOINING_SILENCE_S).
SILENCE_S = 5.0
# The same of a trainer that sends: the chaos trainer's `stall_s`. Above SILENCE_S, so that a silent worker is found out
# before those who wait with it count as stalled.
STALL_S = 8.0
# The outage of the server that issue 3 names, and one that just outlasts what counts as silence.
OUTAGE_S = 20.0
HICCUP_S = 6.0
# After an outage: clients connect again (every 2 s, with jitter), the controller leads again, workers announce.
RECONNECT_S = 10.0


@dataclass(frozen=True, slots=True)
class Case:
    """One fault.

    `serve_s`: until the survivors serve the newest version, beyond one transfer per call. `back_s`: until the one that
    was lost is admitted, from when it is on the bus again, beyond one transfer; None: nobody was lost. `num_calls`: in
    how many calls of `update_weights` the survivors have to be served. `down_s`: how long a server stays away.
    `is_quick`: also run by pytest.
    """

    target: Target
    blow: Blow
    phase: Phase
    serve_s: float
    back_s: float | None = None
    num_calls: int = 1
    down_s: float = 0.0
    engine: str = "torch"
    is_quick: bool = False

    @property
    def name(self) -> str:
        """For `--only`, the table and docs/faults.md."""
        where = self.phase.replace(" ", "-")
        down = f"-{self.down_s:g}s" if self.down_s else ""
        engine = "" if self.engine == "torch" else f"{self.engine}-"
        return f"{engine}{self.target}-{self.blow.removeprefix('SIG').lower()}{down}-{where}"


def _worker_cases() -> Iterator[Case]:
    """Killed: its connections break, everybody knows. Stopped: it is found out by its silence, and wakes up later."""
    for phase in UPDATE_PHASES:
        is_quick = phase is Phase.MID_BROADCAST
        yield Case(Target.WORKER, Blow.KILL, phase, RECOVERY_S, back_s=RECOVERY_S, is_quick=is_quick)
    for phase in UPDATE_PHASES:
        yield Case(Target.WORKER, Blow.STOP, phase, SILENCE_S + RECOVERY_S, back_s=RECOVERY_S)


def _engine_cases() -> Iterator[Case]:
    """One of two ranks: the agent lives on, and is killed with what it can't release."""
    for phase in Phase:
        yield Case(Target.ENGINE, Blow.KILL, phase, RECOVERY_S, back_s=RECOVERY_S)
    for phase in UPDATE_PHASES:
        yield Case(Target.ENGINE, Blow.STOP, phase, SILENCE_S + RECOVERY_S, back_s=RECOVERY_S)


def _trainer_cases() -> Iterator[Case]:
    """Its update ends without it; the next call heals whatever it left: that of the next trainer, or its own."""
    for phase in UPDATE_PHASES:
        is_quick = phase is Phase.MID_BROADCAST
        yield Case(Target.TRAINER, Blow.KILL, phase, STALL_S + RECOVERY_S, num_calls=2, is_quick=is_quick)
    for phase in UPDATE_PHASES:
        yield Case(Target.TRAINER, Blow.STOP, phase, STALL_S + RECOVERY_S, num_calls=2)


def _controller_cases() -> Iterator[Case]:
    """The standby finishes the update, or takes it back; the trainer's call returns with a report either way."""
    serve_s = FAILOVER_S + RECOVERY_S
    for phase in UPDATE_PHASES:
        is_quick = phase is Phase.MID_BROADCAST
        yield Case(Target.CONTROLLER, Blow.KILL, phase, serve_s, num_calls=2, is_quick=is_quick)
    for phase in UPDATE_PHASES:
        yield Case(Target.CONTROLLER, Blow.STOP, phase, serve_s, num_calls=2)


def _server_cases() -> Iterator[Case]:
    """Everybody shares the silence, so nobody is declared dead for it; what ran ends with a report."""
    for phase in Phase:
        yield Case(Target.SERVER, Blow.KILL, phase, RECONNECT_S + RECOVERY_S, num_calls=2)
    for phase in UPDATE_PHASES:
        if phase is not Phase.MID_BROADCAST:
            serve_s = HICCUP_S + RECONNECT_S + RECOVERY_S
            yield Case(Target.SERVER, Blow.STOP, phase, serve_s, num_calls=2, down_s=HICCUP_S)
    serve_s = OUTAGE_S + RECONNECT_S + RECOVERY_S
    yield Case(Target.SERVER, Blow.KILL, Phase.MID_BROADCAST, serve_s, num_calls=2, down_s=OUTAGE_S)
    yield Case(Target.SERVER, Blow.STOP, Phase.MID_BROADCAST, serve_s, num_calls=2, down_s=OUTAGE_S)


def _vllm_cases() -> Iterator[Case]:
    for target in (Target.WORKER, Target.ENGINE):
        yield Case(target, Blow.KILL, Phase.MID_BROADCAST, RECOVERY_S, back_s=RECOVERY_S, engine="vllm")
    yield Case(Target.TRAINER, Blow.KILL, Phase.MID_BROADCAST, STALL_S + RECOVERY_S, num_calls=2, engine="vllm")


CASES: tuple[Case, ...] = (
    *_worker_cases(),
    *_engine_cases(),
    *_trainer_cases(),
    *_controller_cases(),
    *_server_cases(),
    *_vllm_cases(),
)
