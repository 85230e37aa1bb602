"""The seam for engines that take adapters (LoRA): what such an adapter of an engine does beyond `Engine`.

An engine that implements it lists the routes `load_lora`, `unload_lora` and `list_loras`. Ordering contract, kept by
the agent: `load_lora` and `unload_lora` are mutations, so at most one of them, or of `Engine`'s, runs at a time;
`drain_lora` comes within the mutation that unloads; `list_loras` may come beside a mutation. A name@revision that is
loaded is loaded again only with the same bytes.

Invariants that an adapter keeps: a prompt computed with one revision is never served from the cache to another (its
caches are keyed by revision, not by name); a request that names a revision that isn't loaded is refused, never
answered by the base model; an update or reload of the base weights leaves the adapters loaded.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True, slots=True)
class LoraInfo:
    """What the engine can do with adapters; constant after `start`.

    `capacity` is how many it holds at once. `can_drain`: it can refuse new requests for one adapter and count those in
    flight. `can_hot_swap`: it can put a revision in the place of another one without mixing their caches.
    `ends_requests`: an unload ends the requests that name it; else it waits for them, and lets no new ones in.
    `has_short_names`: "name" means its newest revision; else requests have to say "name@revision".
    """

    capacity: int
    can_drain: bool = True
    can_hot_swap: bool = False
    ends_requests: bool = True
    has_short_names: bool = True


@dataclass(frozen=True, slots=True)
class Resident:
    """An adapter that the engine has now. `revision` None: its name is no "name@revision", somebody else loaded it.

    `num_in_flight` is how many requests name it, waiting ones included; None: the engine can't say. `files` is the name
    of the folder that it was loaded from, which has to stay; None: the engine doesn't say.
    """

    name: str
    revision: int | None
    num_in_flight: int | None = None
    is_draining: bool = False
    files: str | None = field(default=None, compare=False)


class LoraEngine(Protocol):
    """The adapters of one engine. Errors are `rlbus.errors.EngineError`; a FaultError with `no_capacity` or
    `manifest_mismatch` promises that nothing has changed.
    """

    @property
    def lora_info(self) -> LoraInfo:
        """Valid after `start`."""
        ...

    async def load_lora(self, name: str, revision: int, folder: Path, replaces: int | None = None) -> None:
        """Load the files of `folder`, which nobody changes and which stays until after the unload. When it returns,
        requests can name "name@revision", and plain "name" (with `has_short_names`) means the newest revision that is
        loaded and not draining.

        `replaces` (only with `can_hot_swap`): takes the place of that revision, which is gone when this returns; its
        requests in flight go on with this one, their cached prefixes computed anew.

        One that is loaded isn't loaded again; a draining one is taken back.

        Raises EngineError, or a refusal: `no_capacity`; `manifest_mismatch` (files that this model can't take). After
        a refusal, and after any failure that it can undo, what was there before still is. Cancel: it may be loaded or
        not; `list_loras` tells, and doesn't answer as long as it may still come.
        """
        ...

    async def drain_lora(self, name: str, revision: int) -> None:
        """Refuse new requests for it from here on; those in flight go on. Only with `can_drain`. Idempotent; one that
        isn't loaded is not an error. Taken back by `load_lora` of the same revision. Cancel: it may drain or not.
        """
        ...

    async def unload_lora(self, name: str, revision: int) -> int | None:
        """Let it go; requests in flight that name it are ended as by an abort (or, without `ends_requests`, waited
        for), never continued with other weights: how many those were, None if the engine can't say. One that isn't
        loaded is not an error.

        Cancel: it may be loaded or not; `list_loras` tells.
        """
        ...

    async def list_loras(self) -> tuple[Resident, ...]:
        """Ask the engine, not a cached list: what a call that failed came to is settled by this. Works beside a
        mutation (unless the engine itself is held by it). Cancel: leaves nothing.
        """
        ...
