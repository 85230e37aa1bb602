"""Identifiers, and the patterns that they have to match before they may stand in a subject.

`InstanceId` is an unsigned 64-bit integer carried as its decimal text: JSON numbers above 2**53 are rounded by
JavaScript clients, and the same text is a subject token.
"""

import re
from typing import Annotated, NewType

import msgspec

# One subject token. NATS forbids white space, '.', '*' and '>'; we allow less, so that names survive shells and URLs.
TOKEN_PATTERN = r"^[A-Za-z0-9_-]{1,64}$"
INSTANCE_ID_PATTERN = r"^(0|[1-9][0-9]{0,19})$"
MAX_INSTANCE_ID = 2**64 - 1

Token = Annotated[str, msgspec.Meta(pattern=TOKEN_PATTERN)]
OpId = Annotated[str, msgspec.Meta(pattern=TOKEN_PATTERN)]
BootId = Annotated[str, msgspec.Meta(pattern=TOKEN_PATTERN)]
InstanceId = Annotated[str, msgspec.Meta(pattern=INSTANCE_ID_PATTERN)]

# "<component>/<instance_id>": names one worker of a namespace in reports, logs and the CLI.
WorkerId = NewType("WorkerId", str)

_TOKEN = re.compile(TOKEN_PATTERN)
_INSTANCE_ID = re.compile(INSTANCE_ID_PATTERN)


def is_token(text: str) -> bool:
    """Whether `text` may stand as one subject token."""
    return _TOKEN.fullmatch(text) is not None


def is_instance_id(text: str) -> bool:
    """Whether `text` is the canonical decimal form of an unsigned 64-bit integer (no sign, no leading zeros)."""
    return _INSTANCE_ID.fullmatch(text) is not None and int(text) <= MAX_INSTANCE_ID


def worker_id(component: str, instance_id: str) -> WorkerId:
    """The name of one worker within its namespace, as reports and the CLI show it."""
    return WorkerId(f"{component}/{instance_id}")


def split_worker_id(worker: WorkerId) -> tuple[str, str]:
    """(component, instance_id) of a worker's name; the reverse of `worker_id`."""
    component, _, instance_id = worker.partition("/")
    return component, instance_id
