"""What a worker remembers over the end of its process: a file of what it was told, and what became of it.

Invariants: a line is one `write` to the end of the file, so a killed process leaves whole lines and at most one torn
last one, which is skipped; the file has at most MAX_LINES lines, then it is written anew beside itself and put in its
place; one process writes it at a time. Nothing is synced to the disk: what a dead process has written is kept by the
system, and a machine that dies takes the engine, and all that it was told, with it.
"""

import contextlib
import fcntl
import logging
import os
import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from rlbus.schemas import Fault, FaultCode, Result, ResultStatus, SleepTag, WeightsState, WeightsView
from rlbus.schemas.base import Wire
from rlbus.workers.draft import restarted
from rlbus.workers.slept import after_sleep
from rlbus.workers.state import WorkerState

_log = logging.getLogger("rlbus.workers")

# Ended ops that are kept, of mutations and of what runs beside them each. Source: journal.MAX_ENDED, so that a
# restarted worker knows what it knew before.
MAX_OPS = 512
# Lines of a file before it is written anew: about half a megabyte.
MAX_LINES = 4 * MAX_OPS
# Ops that run beside mutations, one for each request that somebody ends, say. However many come, the outcome of no
# mutation is forgotten for them. Source: lifecycle.is_mutation, without the queries.
BESIDE_ROUTES = frozenset({"abort_request", "put_manifest", "renew_lease"})
# Longest line. The words of a longer fault are cut.
MAX_LINE_BYTES = 4096
MAX_FAULT_CHARS = 500
# A file that nobody has touched for so long is of another day: no controller asks for those ops any more, and a term
# of then must not shut out the controller of now. Source: a controller asks for an outcome within seconds. A sleep
# lasts until somebody ends it, and is known as long; so are adapters, whose files the engine goes on reading.
KEEP_S = 3600.0


class Began(Wire, frozen=True, kw_only=False, tag="began"):
    """An op was admitted, and may change the engine from here on."""

    op_id: str
    route: str
    digest: str


class Over(Wire, frozen=True, kw_only=False, tag="over"):
    """An op has this one outcome. Its data isn't kept: it told of an engine that is gone."""

    op_id: str
    route: str
    digest: str
    boot_id: str
    status: ResultStatus
    fault: Fault | None = None


class Forgot(Wire, frozen=True, kw_only=False, tag="forgot"):
    """An op was refused after all; nothing has changed."""

    op_id: str


class Noted(Wire, frozen=True, tag="noted"):
    """How the worker is: the largest term that it has seen, the newest group of that term, what sleeps or may do so,
    and which adapters it has loaded: name, revision, checksum. `draft` is None without a draft model. `to_wake` is what
    of `asleep` nobody wants asleep: a sleep has failed.
    """

    term: int
    epoch: int | None
    epoch_term: int
    weights: WeightsView
    asleep: tuple[SleepTag, ...] = ()
    to_wake: tuple[SleepTag, ...] = ()
    loras: tuple[tuple[str, int, str], ...] = ()
    draft: WeightsView | None = None


class Loaded(Wire, frozen=True, kw_only=False, tag="loaded"):
    """The adapters that were noted last, on another day: name, revision, checksum."""

    loras: tuple[tuple[str, int, str], ...]


Line = Began | Over | Forgot | Noted | Loaded
_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Line)


@dataclass(slots=True)
class Past:
    """What a file says. `running` are the ops that have no outcome; `over` is in the order in which they ended, and so
    is `beside`, which has those of BESIDE_ROUTES. `loras` are of another day, until something is noted.
    """

    noted: Noted | None = None
    loras: tuple[tuple[str, int, str], ...] = ()
    running: dict[str, Began] = field(default_factory=dict)
    over: OrderedDict[str, Over] = field(default_factory=OrderedDict)
    beside: OrderedDict[str, Over] = field(default_factory=OrderedDict)
    num_unread: int = 0

    def take(self, line: Line) -> None:
        """One more line."""
        match line:
            case Began():
                self.running[line.op_id] = line
            case Over():
                self.running.pop(line.op_id, None)
                ended = self.beside if line.route in BESIDE_ROUTES else self.over
                ended[line.op_id] = line
                while len(ended) > MAX_OPS:
                    ended.popitem(last=False)
            case Forgot():
                self.running.pop(line.op_id, None)
            case Noted():
                self.noted, self.loras = line, ()
            case Loaded():
                self.loras = line.loras

    def lines(self) -> list[Line]:
        """As few lines as say the same."""
        noted: list[Line] = [] if self.noted is None else [self.noted]
        loaded: list[Line] = [Loaded(self.loras)] if self.loras else []
        return [*noted, *loaded, *self.over.values(), *self.beside.values(), *self.running.values()]


def read(data: bytes) -> Past:
    """The past in a file's bytes; lines that can't be read are counted and skipped."""
    past = Past()
    for text in data.split(b"\n"):
        if not text:
            continue
        try:
            past.take(_decoder.decode(text))
        except (msgspec.MsgspecError, UnicodeDecodeError):
            past.num_unread += 1
    return past


def interrupted(began: Began, boot_id: str) -> Over:
    """The outcome of an op in whose middle the process, or its agent, ended."""
    text = f"the worker's process ended in the middle of {began.route}; it was not run again"
    fault = Fault(code=FaultCode.WORKER_LOST, message=text, detail={"route": began.route})
    return Over(began.op_id, began.route, began.digest, boot_id, ResultStatus.FAILED, fault)


class Ledger:
    """One worker's file, `<folder>/<namespace>/<component>/<instance id>.jsonl`. A context manager; `open` makes it.

    `past` is what the process before has left; if that is older than KEEP_S, only how the engine of a worker is that
    sleeps, and which adapters it had.
    """

    def __init__(self, path: Path, lock_fd: int, past: Past) -> None:
        self.past = past
        self._path = path
        self._lock_fd = lock_fd
        self._kept = replace(
            past, running=dict(past.running), over=OrderedDict(past.over), beside=OrderedDict(past.beside)
        )
        self._fd = -1
        self._num_lines = 0
        # The last line couldn't be written: the file lacks it, and is written anew with the next one.
        self._is_broken = False
        try:
            self._rewrite()
        except OSError as exc:  # what was read counts all the same
            self._give_up(exc)

    @classmethod
    def open(cls, folder: Path, namespace: str, component: str, instance_id: str) -> "Ledger | None":
        """Open a worker's file; None, with the reason in the log, if it can't be had: the worker goes on without.

        Reads and writes at most MAX_LINES lines on the caller's thread. Called once, before the worker is on the bus.
        """
        path = folder / namespace / component / f"{instance_id}.jsonl"
        lock_fd = -1
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock_fd = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return cls(path, lock_fd, _past_of(path))
        except BlockingIOError:
            _log.warning(
                "another process of this machine is worker %s/%s; what happens is not kept", component, instance_id
            )
        except OSError as exc:
            _log.warning("outcomes are not kept over a restart: %s", exc)
        if lock_fd >= 0:
            os.close(lock_fd)
        return None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let the file go; it stays. Idempotent."""
        for fd in (self._fd, self._lock_fd):
            if fd >= 0:
                os.close(fd)
        self._fd = self._lock_fd = -1
        self._is_broken = False

    def began(self, op_id: str, route: str, digest: str) -> None:
        """An op is about to run."""
        self._add(Began(op_id, route, digest))

    def over(self, result: Result, route: str, digest: str) -> None:
        """It has ended."""
        line = Over(result.op_id, route, digest, result.boot_id, result.status, result.fault)
        if result.fault is not None and len(_encoder.encode(line)) > MAX_LINE_BYTES:
            short = Fault(code=result.fault.code, message=result.fault.message[:MAX_FAULT_CHARS])
            line = Over(result.op_id, route, digest, result.boot_id, result.status, short)
        self._add(line)

    def forgot(self, op_id: str) -> None:
        """It was refused after all."""
        self._add(Forgot(op_id))

    def note(self, noted: Noted) -> None:
        """Keep how the worker is, if that is new."""
        if noted != self._kept.noted:
            self._add(noted)

    def touch(self) -> None:
        """The worker lives: what it remembers is of today."""
        if self._fd >= 0 and not self._is_broken:
            with contextlib.suppress(OSError):
                os.utime(self._fd)

    def _add(self, line: Line) -> None:
        self._kept.take(line)
        if self._fd < 0 and not self._is_broken:
            return
        try:
            if self._is_broken or self._num_lines >= MAX_LINES:
                self._rewrite()
            else:
                _write(self._fd, _encoder.encode(line) + b"\n")
                self._num_lines += 1
        except OSError as exc:
            self._give_up(exc)
            return
        if self._is_broken:
            self._is_broken = False
            _log.warning("%s can be written again, and is whole", self._path)

    def _give_up(self, why: OSError) -> None:
        if not self._is_broken:
            text = "%s can't be written (%s): a restart of this worker would know nothing of its ops from here on"
            _log.error(text, self._path, why)
        self._is_broken = True

    def _rewrite(self) -> None:
        """Put a file with as few lines as possible in the place of this one; a reader sees the one or the other."""
        lines = self._kept.lines()
        beside = self._path.with_suffix(".new")
        fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            _write(fd, b"".join(_encoder.encode(line) + b"\n" for line in lines))
            beside.replace(self._path)
        except BaseException:
            os.close(fd)
            raise
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = fd
        self._num_lines = len(lines)


def _write(fd: int, data: bytes) -> None:
    """All of it; the system takes a small piece at once."""
    while data:
        data = data[os.write(fd, data) :]


def _past_of(path: Path) -> Past:
    try:
        age_s = time.time() - path.stat().st_mtime
        past = read(path.read_bytes())
    except FileNotFoundError:
        return Past()
    if past.num_unread:
        _log.warning("%s: %d lines can't be read, and are left out", path, past.num_unread)
    if age_s <= KEEP_S:
        return past
    return Past(_lasting(past.noted), past.loras if past.noted is None else past.loras or past.noted.loras)


def _lasting(noted: Noted | None) -> Noted | None:
    if noted is None or not noted.asleep:
        return None
    return msgspec.structs.replace(noted, term=0, epoch=None, epoch_term=0, loras=())


@contextlib.contextmanager
def opened(folder: str | None, namespace: str, component: str, instance_id: str) -> Iterator[Ledger | None]:
    """The ledger of a worker while inside; None without a folder, or if it can't be had."""
    ledger = None if folder is None else Ledger.open(Path(folder), namespace, component, instance_id)
    with contextlib.nullcontext() if ledger is None else ledger:
        yield ledger


def noted(state: WorkerState) -> Noted:
    """What of a worker's state is worth keeping. A sleep that runs counts as done, whoever hears of its end."""
    state = after_sleep(state)
    own = [(*adapter.key, adapter.checksum) for adapter in state.adapters if adapter.checksum is not None]
    keys = {adapter.key for adapter in state.adapters}
    found = [known for known in state.found_sums if known[:2] not in keys]
    return Noted(
        term=state.term,
        epoch=state.newest_epoch,
        epoch_term=state.epoch_term,
        weights=state.weights,
        asleep=tuple(sorted(state.asleep)),
        to_wake=tuple(sorted(state.to_wake)),
        loras=tuple(sorted([*own, *found])),
        draft=state.draft,
    )


def come_back(fresh: WorkerState, past: Noted) -> WorkerState:
    """The state of a worker whose process was started again: nobody is paused, in a group, or at any known version.

    Its engine has loaded what it was started from, so what it had before is no claim, and no floor for the next
    version either; the version of the fleet, which the controller holds, decides.
    """
    weights = WeightsView(state=WeightsState.UNKNOWN)
    fresh = restarted(fresh)
    return replace(fresh, term=past.term, newest_epoch=past.epoch, epoch_term=past.epoch_term, weights=weights)
