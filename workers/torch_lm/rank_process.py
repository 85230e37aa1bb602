"""The process of a further rank of a torch engine: `python -m rlbus.workers.torch_lm.rank_process FOLDER`.

It holds a copy of the model, joins the group with a rank of its own, and receives what the first rank receives; it
generates nothing. It is told what to do on its standard input and answers on its standard output.
"""

import logging
import os
import sys
import threading
import time
from typing import BinaryIO

from rlbus.errors import FaultError
from rlbus.schemas import Fault, FaultCode
from rlbus.transfer.bounded import GiveUp
from rlbus.workers.engines.base import ReceiveOrder, UpdateFailedError
from rlbus.workers.torch_lm import rank_messages as m
from rlbus.workers.torch_lm.model import load_model
from rlbus.workers.torch_lm.rank import Rank

_log = logging.getLogger("rlbus.workers")

# Between two Advanced of one transfer, but for the last.
ADVANCE_S = 0.1


class RankProcess:
    """Reads requests and runs each in a thread, so that a Leave is heard while one blocks."""

    def __init__(self, rank: Rank, asks: BinaryIO, says: BinaryIO) -> None:
        self._rank = rank
        self._asks = asks
        self._says = says
        self._lock = threading.Lock()

    def run(self) -> None:
        """Until the input ends."""
        self._say(m.Loaded())
        for data in self._asks:
            ask = m.ask_of(data)
            if isinstance(ask, m.Leave):
                self._rank.leave(ask.reason)
                continue
            give_up = self._rank.begin_join() if isinstance(ask, m.Join) else GiveUp()
            threading.Thread(target=self._answer, args=(ask, give_up), daemon=True).start()
        self._rank.leave("the engine is gone")

    def _answer(self, ask: m.AnyAsk, give_up: GiveUp) -> None:
        try:
            done = self._do(ask, give_up)
        except UpdateFailedError as exc:
            done = m.Done(id=ask.id, fault=exc.fault, touched=exc.weights_touched)
        except FaultError as exc:
            done = m.Done(id=ask.id, fault=exc.fault)
        except Exception as exc:  # noqa: BLE001 - the engine gets a fault, the log the traceback
            _log.exception("a rank failed in %s", type(ask).__name__)
            fault = Fault(code=FaultCode.ENGINE_FAILED, message=f"a rank raised {type(exc).__name__}; see the log")
            done = m.Done(id=ask.id, fault=fault, touched=True)
        self._say(done)

    def _do(self, ask: m.AnyAsk, give_up: GiveUp) -> m.Done:
        match ask:
            case m.Join():
                return m.Done(id=ask.id, seat=self._rank.join(ask.plan, ask.rank, give_up))
            case m.Receive():
                order = ReceiveOrder(ask.update_op_id, ask.epoch, ask.version, ask.tensors, ask.bucket_bytes)
                progress = _Progress(self, ask.id)
                received = self._rank.receive(order, lambda: self._say(m.Standing(id=ask.id)), progress)
                return m.Done(id=ask.id, received=received)
            case m.Stage():
                self._rank.stage(ask.path)
            case m.Apply():
                self._rank.apply()
            case m.Discard():
                self._rank.discard()
            case m.Sum():
                return m.Done(id=ask.id, sums=self._rank.checksums())
            case m.Sleep():
                return m.Done(id=ask.id, num_bytes=self._rank.sleep(ask.keeps))
            case m.Wake():
                return m.Done(id=ask.id, num_bytes=self._rank.wake())
        return m.Done(id=ask.id)

    def say_advanced(self, ask_id: int, done: int) -> None:
        """So many bytes have come."""
        self._say(m.Advanced(id=ask_id, done=done))

    def _say(self, message: m.AnySay) -> None:
        with self._lock:
            self._says.write(m.line(message))
            self._says.flush()


class _Progress:
    """Passes on a transfer's progress, not every bucket of it."""

    def __init__(self, process: RankProcess, ask_id: int) -> None:
        self._process = process
        self._id = ask_id
        self._last = 0.0

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if done == total or now - self._last >= ADVANCE_S:
            self._last = now
            self._process.say_advanced(self._id, done)


def main() -> None:
    """Entry of the process. It leaves by `_exit`: a thread that is stuck in the group must not hold it."""
    logging.basicConfig(stream=sys.stderr, format="%(asctime)s rank %(message)s")
    # What libraries print must not get between the messages.
    says = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    try:
        RankProcess(Rank(load_model(sys.argv[1])), sys.stdin.buffer, says).run()
    except BrokenPipeError:
        os._exit(1)  # the engine is gone
    except Exception:  # noqa: BLE001 - the log has it; the engine sees the process end
        _log.exception("the rank's process failed")
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    main()
