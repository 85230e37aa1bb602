"""The seam for engines that keep a label of their weights' version, which can be set without loading anything.

An engine that implements it lists the route `set_weight_version`. The agent calls it as a mutation, on clean weights.
"""

from typing import Protocol

from rlbus.schemas import Version


class LabelEngine(Protocol):
    """The label of one engine. Errors are `rlbus.errors.EngineError`."""

    async def label_weights(self, version: Version) -> None:
        """Let the engine call its weights `version` from here on, in what it says of itself and of its completions.

        Cancel: it may have either label; what it says is shown as drift until it is set again.
        """
        ...
