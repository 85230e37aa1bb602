"""Fleet views and reports as text for people: who is there, who is paused by whom, who is dirty, how an op ended."""

import time
from collections.abc import Sequence

from rlbus.cli.output import Output, age
from rlbus.schemas import (
    AbortedData,
    FleetView,
    FolderSource,
    Generation,
    HistoryItem,
    HistoryView,
    Liveness,
    LoraResult,
    LorasData,
    LoraSource,
    LoraState,
    MemberView,
    Outcome,
    PausedData,
    PauseView,
    Report,
    SleepData,
    WeightsData,
    WeightsState,
    WeightsView,
    WorkerOutcome,
    lora_id,
)

HOW_TO_START = "start one with `rlbus worker fake`, `rlbus worker torch DIR` or `rlbus worker vllm MODEL`"


def show_workers(out: Output, view: FleetView) -> None:
    """One line per worker, then what must not be overlooked."""
    if not present(view):
        out.line(f"no workers in namespace {view.namespace}; {HOW_TO_START}")
    if not view.members:
        return
    now = time.time()
    head = ("WORKER", "ENGINE", "MODEL", "RANKS", "LIVENESS", "GENERATION", "WEIGHTS", "ADMITTED", "SEEN")
    out.table(head, [_member_row(member, now) for member in view.members])
    for member in view.members:
        for warning in warnings_of(member, now, is_op_running=view.op_id is not None):
            out.loud(f"{member.worker} {warning}")
    _show_differences(out, view)


def show_status(out: Output, view: FleetView) -> None:
    """The fleet in two lines, then its workers."""
    version = "none" if view.version is None else str(view.version)
    parts = [f"namespace {view.namespace}", f"version {version}", f"running op {view.op_id or 'none'}"]
    parts += [f"group {'none' if view.epoch is None else view.epoch}", f"controller term {view.term}"]
    out.line(", ".join(parts))
    there = present(view)
    if there:
        num_admitted = sum(member.admitted for member in there)
        ranks = sum(m.descriptor.world_size for m in there if m.liveness is Liveness.ALIVE)
        out.line(f"{counted(len(there), 'worker')}, {num_admitted} admitted, {counted(ranks, 'live rank')}")
    if view.loras:
        out.line(f"adapters: {', '.join(lora_id(one.name, one.revision) for one in view.loras)}")
    show_workers(out, view)


def show_loras(out: Output, view: FleetView, report: Report) -> None:
    """The fleet's adapters, then those of each engine, then who lacks which."""
    now = time.time()
    if view.loras:
        rows = [
            (
                lora_id(one.name, one.revision),
                f"{age(now - one.since)} ago",
                _source_text(one.source),
                one.checksum[:12],
            )
            for one in view.loras
        ]
        out.table(("ADAPTER", "LOADED", "FROM", "CHECKSUM"), rows)
    else:
        out.line(f"namespace {view.namespace} has no adapters")
    for outcome in report.outcomes:
        out.line(f"{outcome.worker}: {_loras_text(outcome)}")
    _show_differences(out, view)


def _show_differences(out: Output, view: FleetView) -> None:
    """Who lacks which of the fleet's adapters, and who serves others."""
    for member in view.members:
        for behind in member.loras_behind:
            out.loud(f"{member.worker} LACKS adapter {behind.id}: {behind.note}")
        for one in member.loras_extra:
            out.loud(f"{member.worker} HAS adapter {one}, which the fleet doesn't have there: unload it")


def _source_text(source: LoraSource) -> str:
    return source.path if isinstance(source, FolderSource) else "the bus's store"


def _loras_text(outcome: WorkerOutcome) -> str:
    if not isinstance(outcome.data, LorasData):
        return "doesn't say" if outcome.fault is None else outcome.fault.message
    texts = []
    for view in outcome.data.loras:
        name = view.name if view.revision is None else lora_id(view.name, view.revision)
        state = "" if view.state is LoraState.LOADED else f" {view.state.value}"
        flight = "" if not view.num_in_flight else f" ({counted(view.num_in_flight, 'request')} in flight)"
        texts.append(f"{name}{state}{flight}")
    return f"{', '.join(texts) or 'none'}; {len(texts)} of {outcome.data.capacity} places"


def lora_text(lora: LoraResult) -> str:
    """What an op about adapters came to, in a line."""
    parts = [", ".join(lora.ids) or "none"]
    parts += ["hot swap, nobody was paused"] if lora.hot_swap else []
    parts += [f"made room: {', '.join(lora.evicted)}"] if lora.evicted else []
    parts += [f"not let go everywhere: {', '.join(lora.partly)}"] if lora.partly else []
    parts += [f"still with requests on {counted(lora.num_draining, 'worker')}"] if lora.num_draining else []
    return f"adapter {'; '.join(parts)}"


def show_history(out: Output, view: HistoryView) -> None:
    """One line per op, newest first; of one that was asked for, also how it ended on each worker."""
    if not view.items:
        out.line(f"nothing was done yet in namespace {view.namespace}")
        return
    now = time.time()
    head = ("BEGAN", "OP", "ID", "BY", "TERM", "STATUS", "WORKERS", "VERSION", "SECONDS", "NOTE")
    out.table(head, [_history_row(item, now) for item in view.items])
    if view.report is not None:
        show_report(out, view.report)


def _history_row(item: HistoryItem, now: float) -> Sequence[str]:
    status = f"in {item.phase}" if item.status is None else item.status.value
    notes = [] if item.settled_by is None else [f"taken over by term {item.settled_by}"]
    notes += [] if item.fault is None else [f"{item.fault.message} [{item.fault.code.value}]"]
    return (
        f"{age(now - item.began_at)} ago",
        item.op if item.what is None else f"{item.op} {item.what}",
        item.op_id,
        item.caller,
        str(item.term),
        status,
        f"{item.num_ok}/{item.num_workers}",
        "" if item.version is None else str(item.version),
        "" if item.ended_at is None else f"{item.ended_at - item.began_at:.2f}",
        "; ".join(notes),
    )


def present(view: FleetView) -> list[MemberView]:
    """The workers that are there: not those that left or are dead, which a view shows for a while."""
    return [m for m in view.members if m.liveness in (Liveness.ALIVE, Liveness.SUSPECT)]


def counted(count: int, what: str) -> str:
    """`1 worker`, `2 workers`."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def warnings_of(member: MemberView, now: float, *, is_op_running: bool = False) -> list[str]:
    """What an operator has to know about a worker, in words. `now` in Unix seconds; `is_op_running` on the fleet."""
    found = []
    weights, pause = member.status.weights, member.status.pause
    if weights.state is WeightsState.DIRTY:
        last = "" if weights.last_good is None else f" (last good: {weights.last_good})"
        is_forced = member.status.generation is Generation.RUNNING
        what = "GENERATES with them, since somebody forced it" if is_forced else "stays paused"
        found.append(f"is DIRTY{last}: its weights are torn, it {what} until a full update or `rlbus update`")
    if weights.state is WeightsState.UNKNOWN:
        found.append("has UNKNOWN weights: nobody can say which, until an update")
    is_left = not is_op_running and member.status.op_id is None
    if weights.state is WeightsState.UPDATING and is_left:
        found.append("has an update OPEN that nobody ends: the next full update or `rlbus update` heals it")
    if member.status.draft is not None:
        found += _draft_warnings(member.status.draft, is_left)
    if member.status.asleep:
        found.append(f"is ASLEEP: {', '.join(member.status.asleep)}; it generates nothing until `rlbus wake`")
    if pause is not None:
        held = f"is PAUSED by {pause.owner} ({pause.mode}) for {age(now - pause.since)}"
        found.append(f"{held}, {lease_text(pause, now)}")
    elif member.status.generation is Generation.PAUSED and not member.status.asleep:
        found.append("is PAUSED, by nobody that rlbus knows of")
    if member.liveness in (Liveness.SUSPECT, Liveness.DEAD):
        found.append(f"is {member.liveness.value.upper()}: last heard of {age(member.age_s)} ago")
    if member.status.drift is not None:
        found.append(f"DRIFTS: {member.status.drift}")
    return found


def _draft_warnings(draft: WeightsView, is_left: bool) -> list[str]:
    if draft.state is WeightsState.DIRTY:
        last = "" if draft.last_good is None else f" (last good: {draft.last_good})"
        return [f"has a DIRTY draft model{last}: it stays paused until a full update of the draft"]
    if draft.state is WeightsState.UPDATING and is_left:
        return ["has an update of its draft model OPEN that nobody ends: the next full update of the draft heals it"]
    return []


def lease_text(pause: PauseView, now: float) -> str:
    """How long a pause still holds, in words. `now` in Unix seconds."""
    if pause.expires_at is None:
        return "until it is resumed"
    if pause.expires_at <= now:
        return f"its lease ended {age(now - pause.expires_at)} ago"
    return f"its lease ends in {age(pause.expires_at - now)} if nobody renews it"


def weights_text(weights: WeightsView) -> str:
    """`0.7`, `DIRTY`, `unknown`, or `clean` for weights that rlbus never gave."""
    if weights.state is not WeightsState.CLEAN:
        return weights.state.value.upper()
    return "initial" if weights.version is None else str(weights.version)


def _member_row(member: MemberView, now: float) -> Sequence[str]:
    status, descriptor = member.status, member.descriptor
    generation = status.generation.value
    if status.pause is not None:
        held = "hold" if status.pause.expires_at is None else "lease"
        generation = f"paused {age(now - status.pause.since)} ({held})"
    if status.asleep:
        generation = f"asleep ({', '.join(status.asleep)})"
    admitted = "yes" if member.admitted else f"no: {member.reason or 'not said why'}"
    return (
        member.worker,
        descriptor.engine,
        descriptor.model,
        str(descriptor.world_size),
        member.liveness.value + ("" if status.work is None else " (at work)"),
        generation,
        weights_text(status.weights) + ("" if status.draft is None else f", draft {weights_text(status.draft)}"),
        admitted,
        f"{age(member.age_s)} ago",
    )


def show_report(out: Output, report: Report) -> None:
    """How an op ended, one line per worker, and the seconds of each phase of a longer one."""
    num_ok = sum(outcome.outcome is Outcome.OK for outcome in report.outcomes)
    workers = counted(len(report.outcomes), "worker")
    text = f"{report.op}: {report.status.value}, {num_ok} of {workers}, {report.took_s:.2f} s"
    if report.version is not None:
        text += f", version {report.version}"
    out.line(text)
    if report.outcomes:
        out.table(("WORKER", "OUTCOME", "PHASE", "SECONDS", "RESULT"), [_outcome_row(o) for o in report.outcomes])
    if len(report.phases_s) > 1:
        phases = "  ".join(f"{name} {seconds:.2f}" for name, seconds in report.phases_s.items())
        # Of who was refused nothing was changed, nor of who wasn't asked: nobody stood still.
        is_paused = {outcome.outcome for outcome in report.outcomes} - {Outcome.REFUSED, Outcome.SKIPPED}
        paused = f"  (engines stood still for {report.paused_s:.2f})" if report.paused_s > 0 and is_paused else ""
        out.line(f"seconds: {phases}{paused}")


def _outcome_row(outcome: WorkerOutcome) -> Sequence[str]:
    name = outcome.outcome.value
    shown = name if outcome.outcome is Outcome.OK else name.upper()
    return (outcome.worker, shown, outcome.phase, f"{outcome.took_s:.2f}", _result_text(outcome))


def _result_text(outcome: WorkerOutcome) -> str:
    if outcome.fault is not None:
        return f"{outcome.fault.message} [{outcome.fault.code.value}]"
    match outcome.data:
        case WeightsData(weights=weights, draft=draft):
            return f"weights {weights_text(weights)}" + ("" if draft is None else f", draft {weights_text(draft)}")
        case PausedData(num_aborted=num_aborted, num_held=num_held):
            counts = [("ended", num_aborted), ("held", num_held)]
            return ", ".join(f"{count} {what}" for what, count in counts if count is not None)
        case SleepData(asleep=asleep, num_bytes=num_bytes):
            moved = "" if num_bytes is None else f", {num_bytes / 2**20:.1f} MiB"
            return f"asleep: {', '.join(asleep) or 'nothing'}{moved}"
        case AbortedData(num_aborted=num_aborted, num_deferred=num_deferred, num_left=num_left):
            later = f", {num_deferred} end at their first token" if num_deferred else ""
            left = f", {num_left} left" if num_left else ""
            return f"{'' if num_aborted is None else f'{num_aborted} '}requests ended{later}{left}"
        case _:
            return ""


def failure_text(report: Report) -> str:
    """One line that says why a report isn't ok and what was first."""
    if report.fault is not None:
        return f"{report.op} {report.status.value}: {report.fault.message} [{report.fault.code.value}]"
    for outcome in report.outcomes:
        if outcome.fault is not None:
            return f"{report.op} {report.status.value}: {outcome.worker}: {outcome.fault.message}"
    return f"{report.op} {report.status.value}"
