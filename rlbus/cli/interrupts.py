"""What Ctrl-C does to a command, from its first line to its last.

| while | Ctrl-C |
|---|---|
| it is loaded, and its options are read | ends it at once with 130, without a word |
| it works | raises KeyboardInterrupt, or what the command has put in its place (asyncio, a service) |
| its outcome is known: it is told, connections are closed, Python ends | is ignored once, for that is bounded; a second one, because something hangs all the same, ends it at once with the code of the outcome |

Little of the standard library is all that it needs: it is there before the rest is loaded.
"""  # noqa: E501 - a table

import atexit
import os
import signal
from types import FrameType

INTERRUPTED = 130


class Interrupts:
    """Ctrl-C of this process, from `begin` on. Where a shell lets the process ignore it, nothing is done."""

    def __init__(self) -> None:
        self._is_ours = False
        self._code: int | None = None
        self._num_ignored = 0

    def begin(self) -> None:
        """The command is being loaded: there is nothing to take back."""
        # A shell lets what it starts in the background ignore Ctrl-C.
        if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            return
        self._is_ours = True
        signal.signal(signal.SIGINT, self._end_at_once)
        # Python gives SIGINT back to the system before it takes its modules down, unless it is ignored. Registered
        # first, so it is the last to run.
        atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)

    def count(self) -> None:
        """From here on Ctrl-C is KeyboardInterrupt: there is something to take back."""
        if self._is_ours and self._code is None:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def settle(self, code: int) -> int:
        """How the command ends is known, and Ctrl-C changes it no more. Returns what was settled first."""
        if not self._is_ours:
            return code
        if self._code is None:
            self._code = code
        # Loaded by now; at the beginning it would take longer than all else.
        import asyncio
        import contextlib

        with contextlib.suppress(RuntimeError):  # no loop runs
            # Or the loop would put Python's own handler back when it is closed.
            asyncio.get_running_loop().remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, self._ignore_once)
        return self._code

    def _end_at_once(self, _number: int, _frame: FrameType | None) -> None:
        os._exit(INTERRUPTED)

    def _ignore_once(self, _number: int, _frame: FrameType | None) -> None:
        self._num_ignored += 1
        if self._num_ignored > 1:
            os._exit(INTERRUPTED if self._code is None else self._code)


interrupts = Interrupts()
