"""`rlbus controller` with a brake, so that a blow falls in the phase it is meant for, however loaded the machine is.

It is the real controller; only before it sends the command of an update that the harness has armed the brake for, it
waits until the harness lets go: everything before that command is done, nothing of it has begun. Its loop goes on: it
journals, renews its lease and hears what happens. Run as `python -m tests.chaos.controller`, with the brake's folder in
RLBUS_CHAOS_BRAKE.
"""

import os
import sys
from pathlib import Path
from unittest.mock import patch

from rlbus.cli.app import main as rlbus_main
from rlbus.controller import service
from rlbus.controller.update import UpdateRun
from rlbus.controller.update_state import Ask
from tests.chaos.brake import Brake

FOLDER_VARIABLE = "RLBUS_CHAOS_BRAKE"


class BrakedRun(UpdateRun):
    """An update whose commands pass the brake."""

    async def _ask(self, ask: Ask) -> None:
        await Brake(Path(os.environ[FOLDER_VARIABLE])).hold(type(ask.body).__name__, self.state.phase)
        await super()._ask(ask)


def main() -> None:
    """Entry of the process."""
    sys.argv = ["rlbus", "controller"]
    with patch.object(service, "UpdateRun", BrakedRun):
        rlbus_main()


if __name__ == "__main__":
    main()
