"""Identifiers, and the patterns that they have to match before they may stand in a subject.

`InstanceId` is an unsigned 64-bit integer carried as its decimal text: JSON numbers above 2**53 are rounded by
JavaScript clients, and the same text is a subject token.
"""

import re
from typing import Annotated, NewType

import msgspec

MAX_INSTANCE_ID = 2**64 - 1


def _up_to(limit: int) -> str:
    """A pattern of the canonical decimal numbers from 0 to `limit`."""
    digits = str(limit)
    # Longest first: most ids have all the digits, and shouldn't be tried as shorter ones before.
    choices = []
    for i, digit in enumerate(digits):
        low = 1 if i == 0 else 0
        if int(digit) > low:
            choices.append(f"{digits[:i]}[{low}-{int(digit) - 1}][0-9]{{{len(digits) - i - 1}}}")
    return "|".join([*choices, digits, f"[1-9][0-9]{{0,{len(digits) - 2}}}", "0"])


# One subject token. NATS forbids white space, '.', '*' and '>'; we allow less, so that names survive shells and URLs.
# `(?!\n)`: Python's `$` also matches before a last newline.
TOKEN_PATTERN = r"^[A-Za-z0-9_-]{1,64}$(?!\n)"
INSTANCE_ID_PATTERN = rf"^({_up_to(MAX_INSTANCE_ID)})$(?!\n)"

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
    return _TOKEN.search(text) is not None


def is_instance_id(text: str) -> bool:
    """Whether `text` is the canonical decimal form of an unsigned 64-bit integer (no sign, no leading zeros)."""
    return _INSTANCE_ID.search(text) is not None


def worker_id(component: str, instance_id: str) -> WorkerId:
    """The name of one worker within its namespace, as reports and the CLI show it."""
    return WorkerId(f"{component}/{instance_id}")


def split_worker_id(worker: WorkerId) -> tuple[str, str]:
    """(component, instance_id) of a worker's name; the reverse of `worker_id`."""
    component, _, instance_id = worker.partition("/")
    return component, instance_id
