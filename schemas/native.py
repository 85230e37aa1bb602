"""Commands of an update that somebody else's trainer drives, in the words of vLLM's weight transfer.

init -> (start -> update, once or more -> finish) as often as wanted -> shutdown. What is said in `info` is between that
trainer and the engine's own transfer backend; it passes through unread, as JSON text, so that a command stays a value.
The rules are those of any update: one at a time, paused, from the first `update_weights` on not clean before a finish.
"""

from rlbus.schemas.base import Body
from rlbus.schemas.ids import OpId
from rlbus.schemas.weights import Version


class InitTransfer(Body, frozen=True, kw_only=True, tag="init_weight_transfer_engine"):
    """Let the engine join the trainer's own group. `info` is a JSON object, with the rank offset of this worker.

    It leaves any group that rlbus had formed. An update that an earlier trainer has left open is given up: torn if
    anything had come.
    """

    info: str


class ShutdownTransfer(Body, frozen=True, kw_only=True, tag="shutdown_weight_transfer_engine"):
    """Leave the trainer's group. An update that is open is given up first: torn if anything had come."""


class StartUpdate(Body, frozen=True, kw_only=True, tag="start_weight_update"):
    """Open an update. Precondition: paused. One that an earlier start has left open is given up. Nothing changes yet.

    The op_id of this command names the update.
    """


class ApplyUpdate(Body, frozen=True, kw_only=True, tag="update_weights"):
    """Receive and load what `info` (a JSON object, or a list of them) describes. From here on the weights are
    `updating`; a failure leaves them dirty and the update closed.

    `update_op_id` None: the one that is open.
    """

    info: str
    update_op_id: OpId | None = None


class FinishUpdate(Body, frozen=True, kw_only=True, tag="finish_weight_update"):
    """Everything was sent: become clean at `version`. None: the step after the last one that was good.

    A repeat is refused, since no update is open any more; the version then says that it was done.
    """

    version: Version | None = None
    update_op_id: OpId | None = None


NativeBody = InitTransfer | ShutdownTransfer | StartUpdate | ApplyUpdate | FinishUpdate
