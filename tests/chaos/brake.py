"""How the harness holds a controller before one command: two files in a folder, since the bus itself may be struck."""

import asyncio
from pathlib import Path

POLL_S = 0.005
# The longest that a controller waits to be let go.
HOLD_S = 10.0


class Brake:
    """Both sides of it. `arm`, `reached` and `let_go` are the harness', `hold` the controller's."""

    def __init__(self, folder: Path) -> None:
        self._armed = folder / "brake-armed"
        self._reached = folder / "brake-reached"

    def arm(self, command: str) -> None:
        """Hold whoever is about to send `command`, by the name of its class, from now on."""
        self._reached.unlink(missing_ok=True)
        self._armed.write_text(command)

    def reached(self) -> str | None:
        """The phase in which a controller is held; None: none is."""
        return self._reached.read_text() or None if self._reached.exists() else None

    def let_go(self) -> None:
        """Hold nobody any more. Idempotent."""
        self._armed.unlink(missing_ok=True)

    async def hold(self, command: str, phase: str) -> None:
        """Wait until the harness lets go, if it is armed for `command`; at most HOLD_S. Cancel: leaves nothing."""
        if self._armed_for() != command:
            return
        self._reached.write_text(phase)
        until_s = asyncio.get_running_loop().time() + HOLD_S
        while self._armed_for() == command and asyncio.get_running_loop().time() < until_s:  # noqa: ASYNC110 - a file
            await asyncio.sleep(POLL_S)

    def _armed_for(self) -> str | None:
        try:
            return self._armed.read_text()
        except FileNotFoundError:
            return None
