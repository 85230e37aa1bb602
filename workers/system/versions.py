"""What foreign orchestrators call a version of the weights, and which version that is.

They use step numbers ("7", 7), our own ("1.7"), or a word before one ("v7", "step-7", "policy@7"). What they called it
is remembered as long as the weights have that version, so that they read what they have written.
"""

import re
from typing import Any

from rlbus.schemas import Version
from rlbus.schemas.weights import MAX_VERSION_NUMBER
from rlbus.workers.state import WorkerState

MAX_LABEL_CHARS = 128
# A word that begins with a letter, and at the end a step, or incarnation and step.
_LABEL = re.compile(r"^(?:[A-Za-z]\D*)?(?:(\d{1,16})\.)?(\d{1,16})$(?!\n)", re.ASCII)


def version_of(label: Any, state: WorkerState) -> Version | None:
    """The version that a label stands for; None: for none. Without an incarnation it is the worker's own."""
    if isinstance(label, int) and not isinstance(label, bool):
        step, incarnation = label, None
    elif isinstance(label, str) and len(label) <= MAX_LABEL_CHARS and (found := _LABEL.search(label)):
        step, incarnation = int(found[2]), None if found[1] is None else int(found[1])
    else:
        return None
    incarnation = _newest(state).incarnation if incarnation is None else incarnation
    if not (0 <= step <= MAX_VERSION_NUMBER and incarnation <= MAX_VERSION_NUMBER):
        return None
    return Version(incarnation=incarnation, step=step)


def next_version(state: WorkerState) -> Version:
    """The version of an update whose sender doesn't name it."""
    newest = _newest(state)
    return Version(incarnation=newest.incarnation, step=newest.step + 1)


def _newest(state: WorkerState) -> Version:
    return state.weights.version or state.weights.last_good or Version()


class Labels:
    """What the weights were called last by somebody who named them."""

    def __init__(self) -> None:
        self._named: tuple[Version, Any] | None = None

    def note(self, version: Version, label: Any) -> None:
        """Somebody calls this version so."""
        self._named = (version, label)

    def of(self, version: Version) -> tuple[Any, bool]:
        """What a version is called, and whether somebody has said so."""
        if self._named is not None and self._named[0] == version:
            return self._named[1], True
        return str(version), False
