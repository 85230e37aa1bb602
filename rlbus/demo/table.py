"""What a person sees of the demo: a live table on a terminal, one line per step elsewhere."""

from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from rlbus.demo.events import StepDone

# The phases that get a column of their own; the rest is in the total.
PHASES = ("prepare", "group", "pause", "transfer", "commit", "flush", "resume")
# Older rows scroll out of the live table, so that it fits a terminal.
NUM_ROWS = 16


class StepTable:
    """Shows what the demo waits for, and then each step. Context manager."""

    def __init__(self, console: Console, title: str) -> None:
        self._console = console
        self._title = title
        self._steps: list[StepDone] = []
        self._status = ""
        self._live = Live(console=console, refresh_per_second=4, transient=False) if console.is_terminal else None

    def __enter__(self) -> "StepTable":
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        if self._live is not None:
            self._status = ""
            self._live.update(self._render(), refresh=True)
            self._live.stop()

    def status(self, text: str) -> None:
        """Say what is being waited for."""
        self._status = text
        if self._live is not None:
            self._live.update(self._render())
        else:
            self._console.print(text, highlight=False, soft_wrap=True)

    def add(self, step: StepDone) -> None:
        """Show a finished step."""
        self._steps.append(step)
        if self._live is not None:
            self._live.update(self._render())
            return
        versions = " ".join(f"{_short(worker)}={version}" for worker, version in step.versions.items())
        phases = " ".join(f"{name}={step.phases_s.get(name, 0.0):.3f}" for name in PHASES)
        self._console.print(
            f"step {step.step:3d}  reward {step.reward:.3f}  versions {versions}  update {step.update_s:.3f} s "
            f"({phases})  probe {_verdict(step)}",
            highlight=False,
            soft_wrap=True,
        )

    def _render(self) -> Table:
        table = Table(title=self._title, caption=self._status or None)
        workers = list(dict.fromkeys(worker for step in self._steps[-NUM_ROWS:] for worker in step.versions))
        for name in ("step", "reward", *(_short(w) for w in workers), *PHASES, "update s", "probe"):
            table.add_column(name, justify="right")
        for step in self._steps[-NUM_ROWS:]:
            table.add_row(
                str(step.step),
                f"{step.reward:.3f}",
                *(step.versions.get(w, "-") for w in workers),
                *(f"{step.phases_s.get(name, 0.0):.3f}" for name in PHASES),
                f"{step.update_s:.3f}",
                Text(_verdict(step), style="green" if not step.mismatches and not step.mixed else "bold red"),
            )
        return table


def _short(worker: str) -> str:
    """The component and the last four digits of the instance id: enough to tell the demo's workers apart."""
    component, _, instance_id = worker.partition("/")
    return f"{component}/{'…' if len(instance_id) > 4 else ''}{instance_id[-4:]}"


def _verdict(step: StepDone) -> str:
    if step.mixed:
        return f"{step.mixed} at another version"
    if step.mismatches:
        return f"{step.mismatches} differ"
    return f"equal ({step.near_ties} near ties)" if step.near_ties else "equal"
