"""What the harness and its trainer process tell each other: one JSON line each, over stdin and stdout."""

import msgspec


class Update(msgspec.Struct, frozen=True, kw_only=True, tag_field="do", tag="update"):
    """Call `update_weights` with the weights of `version`. With `hold` the source waits once, half way, for `LetGo`."""

    version: int
    hold: bool = False
    deadline_s: float
    stall_s: float


class LetGo(msgspec.Struct, frozen=True, kw_only=True, tag_field="do", tag="let_go"):
    """The source need not wait any more."""


Order = Update | LetGo


class Up(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="up"):
    """Connected, the model is there."""


class Tokens(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="tokens"):
    """What the trainer's own model generates greedily with the weights of `version`, up to its first near tie."""

    version: int
    tokens: tuple[int, ...]


class Held(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="held"):
    """The source waits: the tensors before are sent, or about to be."""

    version: int


class Ended(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="ended"):
    """The call returned a report (`status`, and of each worker outcome, phase and fault), or raised `error`."""

    version: int
    took_s: float
    op_id: str | None = None
    status: str | None = None
    outcomes: dict[str, tuple[str, str, str]] = {}
    error: str = ""


News = Up | Tokens | Held | Ended
# The prompt of every probe, and how many tokens are generated.
PROBE_PROMPT = (11, 22, 33, 44, 55, 66, 77, 88)
PROBE_TOKENS = 16
