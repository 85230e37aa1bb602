"""Adapters (LoRA): what a worker is told about them, and what it says.

Invariant: `name@revision` stands for the same bytes for ever, whose checksum every load names. A trainer that publishes
again takes the next revision; requests name `policy@7`, or `policy` for the newest one that is loaded.
"""

import enum
import re
from typing import Annotated

import msgspec

from rlbus.schemas.base import Body, Data, Wire
from rlbus.schemas.faults import Fault
from rlbus.schemas.ids import Token

# One adapter's name: a model name for clients, a file name for caches. No '@' (that begins the revision), no '/'.
# `(?!\n)`: Python's `$` also matches before a last newline.
LORA_NAME_PATTERN = r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}$(?!\n)"
# Largest revision: JSON numbers above it lose digits.
MAX_REVISION = 2**53
# Longest path of a source, in characters.
MAX_PATH_CHARS = 4096
# Adapters that one worker may have, and so the longest list of them; an engine's own capacity is far below.
MAX_LORAS = 256
# How long requests in flight may keep an adapter that is to go, in seconds: a long rollout takes minutes.
DEFAULT_DRAIN_S = 300.0
MAX_DRAIN_S = 86_400.0

LoraName = Annotated[str, msgspec.Meta(pattern=LORA_NAME_PATTERN)]
Revision = Annotated[int, msgspec.Meta(ge=1, le=MAX_REVISION)]
# 64 lower-case hex digits.
SHA256_PATTERN = r"^[0-9a-f]{64}$(?!\n)"
Sha256 = Annotated[str, msgspec.Meta(pattern=SHA256_PATTERN)]
DrainS = Annotated[float, msgspec.Meta(ge=0, le=MAX_DRAIN_S)]

# How much of an adapter's checksum a status has, in hex digits: a heartbeat names up to 64 adapters.
SHORT_SUM_CHARS = 16

_SHA256 = re.compile(SHA256_PATTERN)
_LORA_NAME = re.compile(LORA_NAME_PATTERN)
_LORA_ID = re.compile(r"^([A-Za-z0-9_][A-Za-z0-9_.-]{0,63})@([1-9][0-9]{0,15})$(?!\n)")


def is_sha256(text: str) -> bool:
    """Whether `text` is a checksum as it is sent: 64 lower-case hex digits."""
    return _SHA256.search(text) is not None


def is_lora_name(text: str) -> bool:
    """Whether `text` may name an adapter."""
    return _LORA_NAME.search(text) is not None


def lora_id(name: str, revision: int) -> str:
    """The name under which requests ask for one revision: "policy@7"."""
    return f"{name}@{revision}"


def split_lora_id(text: str) -> tuple[str, int] | None:
    """(name, revision) of "policy@7"; None for anything else. The reverse of `lora_id`."""
    found = _LORA_ID.search(text)
    return None if found is None else (found[1], int(found[2]))


class FolderSource(Wire, frozen=True, kw_only=True, tag_field="kind", tag="folder"):
    """A PEFT folder that the worker can read, below one of its adapter roots."""

    path: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_PATH_CHARS)]


class ObjectSource(Wire, frozen=True, kw_only=True, tag_field="kind", tag="object"):
    """The adapter's files as one object in the bus's object store, under the checksum of those files; `sha256` and
    `num_bytes` are the object's own.

    `key` may be any text here, since it was so in what is kept: whoever uses it looks at `has_good_key` first.
    """

    bucket: Token
    key: str
    sha256: Sha256
    num_bytes: Annotated[int, msgspec.Meta(ge=1)]

    @property
    def has_good_key(self) -> bool:
        """Whether the key is a checksum. It becomes a part of subjects, and says what is deleted: a wildcard would mean
        every object of the fleet.
        """
        return is_sha256(self.key)


LoraSource = FolderSource | ObjectSource


class LoadLora(Body, frozen=True, kw_only=True, tag="load_lora"):
    """Let requests name this adapter. Answered with `LorasData`.

    `checksum` is that of the adapter's files (`rlbus.adapter`), wherever they come from. The same name@revision with
    the same checksum again is ok and changes nothing; with another one it is `revision_taken`. Refused with
    `no_capacity` when every place is taken, unless `evict_idle`: then idle older revisions of the same name make room,
    oldest first. `hot_swap` lets the newest older revision of the name be replaced in its place, its requests in
    flight going on with this one, if the engine can do that soundly; without it both stay.
    """

    name: LoraName
    revision: Revision
    checksum: Sha256
    source: LoraSource
    hot_swap: bool = False
    evict_idle: bool = False


class UnloadLora(Body, frozen=True, kw_only=True, tag="unload_lora"):
    """Let this adapter go. One that isn't loaded is ok. Answered with `LorasData`.

    With requests in flight it is `draining`: no new request may name it, and it goes when they have ended, at the
    latest after `drain_s`, when they are ended. The answer doesn't wait for that. An engine that can't tell (see
    `LorasView.can_drain`) lets it go at once. A load of the same revision before then takes it back.
    """

    name: LoraName
    revision: Revision
    drain_s: DrainS = DEFAULT_DRAIN_S


class GetLoras(Body, frozen=True, kw_only=True, tag="list_loras"):
    """Ask the engine which adapters it has now; answered beside whatever runs, with `LorasData`."""


# The routes of a worker that takes adapters: whoever serves one serves all.
LORA_ROUTES = frozenset({"load_lora", "unload_lora", "list_loras"})


class LoraState(enum.StrEnum):
    """What a worker does with an adapter."""

    LOADED = "loaded"
    DRAINING = "draining"  # no new request may name it
    UNSETTLED = "unsettled"  # a load or unload of it went wrong, and the engine hasn't said yet what became of it


class LoraView(Wire, frozen=True, kw_only=True):
    """One adapter in the engine. `revision` is None for a name that somebody else has put there, `checksum` for one
    whose bytes nobody knows: it is no proof that anything is loaded.

    `num_in_flight` is the number of requests that name it; None: the engine can't say.
    """

    name: str
    state: LoraState
    revision: int | None = None
    checksum: str | None = None
    num_in_flight: int | None = None


class LorasData(Data, frozen=True, kw_only=True, tag="loras"):
    """Which adapters the engine has, by its own word, in the order of their names and revisions.

    `capacity` is how many fit. After a load: `hot_swap` says that it took an older revision's place, `evicted` which
    ones had to go ("policy@3"). `num_aborted`: requests that were ended with an adapter that went. `cause`: the
    engine's call went wrong in this way, and its own list proved that what was asked for is done all the same.
    """

    loras: tuple[LoraView, ...]
    capacity: int
    hot_swap: bool = False
    evicted: tuple[str, ...] = ()
    num_aborted: int = 0
    cause: Fault | None = None


class LorasView(Wire, frozen=True, kw_only=True):
    """Adapters in a worker's status, as its engine said last: "policy@7", sorted, those that drain left out.

    `sums`: of each of `ids` the first SHORT_SUM_CHARS digits of its checksum, "" where nobody knows its bytes.
    `can_drain`: the engine knows which requests name an adapter. `can_hot_swap`: its caches are keyed by revision.
    """

    ids: tuple[str, ...]
    capacity: int
    num_draining: int = 0
    can_drain: bool = True
    can_hot_swap: bool = False
    sums: tuple[str, ...] = ()
