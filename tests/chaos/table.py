"""The table that `python -m tests.chaos` prints, a line per case as it ends, and the totals."""

from collections.abc import Sequence
from dataclasses import dataclass

from tests.chaos.cases import Case
from tests.chaos.judge import Observation

COLUMNS = (
    ("case", 40),
    ("phase hit", 10),
    ("serving", 8),
    ("victim back", 12),
    ("failover", 9),
    ("calls", 22),
    ("restarts", 9),
    ("lost ops", 9),
    ("reruns", 7),
    ("verdict", 7),
)


@dataclass(frozen=True, slots=True)
class Row:
    """One case as it ended. `broken`: promises that didn't hold; `seen` None: the stage couldn't be set.

    `reruns`: why it was run again, of each time.
    """

    case: Case
    seen: Observation | None
    broken: tuple[str, ...]
    reruns: tuple[str, ...] = ()


def header() -> str:
    """The names of the columns."""
    return "  ".join(name.ljust(width) for name, width in COLUMNS).rstrip()


def line(row: Row) -> str:
    """One case; what it broke stands below it."""
    seen = row.seen
    cells = [row.case.name]
    if seen is not None:
        calls = " ".join(f"{c.status or 'raised'} {c.took_s:.1f}s" for c in seen.calls)
        back_s = None if seen.returned_s is None or seen.back_s is None else seen.returned_s + seen.back_s
        cells += [seen.phase_hit, _seconds(seen.serving_s), _seconds(back_s), _seconds(seen.failover_s), calls or "-"]
        cells += [str(len(seen.restarted)), str(len(seen.lost_ops))]
    else:
        cells += ["-"] * (len(COLUMNS) - 3)
    cells.append(str(len(row.reruns)))
    cells.append("BROKEN" if row.broken else "held")
    text = "  ".join(cell.ljust(width) for cell, (_, width) in zip(cells, COLUMNS, strict=True)).rstrip()
    notes = [*(f"run again, since it couldn't be run: {why}" for why in row.reruns), *row.broken]
    if row.broken and seen is not None and seen.stood_still:
        notes.append(f"somebody stood still meanwhile: {seen.stood_still}")
    return "\n".join([text, *(f"    {note}" for note in notes)])


def totals(rows: Sequence[Row], seconds: float) -> dict[str, object]:
    """What the last line says, as JSON."""
    observations = [row.seen for row in rows if row.seen is not None]
    served = [seen.serving_s for seen in observations if seen.serving_s is not None]
    failovers = [seen.failover_s for seen in observations if seen.failover_s is not None]
    return {
        "cases": len(rows),
        "broken": [row.case.name for row in rows if row.broken],
        "restarts_of_healthy_engines": sum(len(seen.restarted) for seen in observations),
        "lost_ops": sum(len(seen.lost_ops) for seen in observations),
        "reruns": sum(len(row.reruns) for row in rows),
        "wrong_outputs": sum(len(seen.wrong_outputs) for seen in observations),
        "serving_s_max": round(max(served), 2) if served else None,
        "failover_s_max": round(max(failovers), 2) if failovers else None,
        "seconds": round(seconds, 1),
    }


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s"
