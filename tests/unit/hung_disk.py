"""A disk that hangs, for the tests of the two HTTP sides that read adapters' folders."""

import threading
from pathlib import Path
from typing import Any

from rlbus.adapter import adapter_sum
from rlbus.testing import hangs

# A test that fails leaves no thread for longer, in real seconds.
LEFT_S = 30.0


class HungDisk:
    """Reads of folders named "hung..." don't return before `heal`."""

    def __init__(self) -> None:
        self._is_well = threading.Event()
        self.threads: list[threading.Thread] = []

    def read(self, folder: Path) -> Any:
        """As `adapter_sum`."""
        if folder.name.startswith("hung"):
            self.threads.append(threading.current_thread())
            with hangs():
                self._is_well.wait(LEFT_S)
        return adapter_sum(folder)

    def heal(self) -> None:
        """Give back what hangs."""
        self._is_well.set()
        for thread in self.threads:
            thread.join(LEFT_S)
