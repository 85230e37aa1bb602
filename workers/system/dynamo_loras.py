"""Dynamo's routes for adapters: `load_lora`, `unload_lora`, and `/v1/loras`.

Dynamo loads a name from a URI; here a name has revisions, whose bytes never change. `policy@7` asks for that revision;
of `policy` alone the files decide: those of its newest revision here keep that, others get the next one, and requests
that name `policy` get the newest, so that these files are what they get.
"""

from collections.abc import Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

from rlbus.adapter import AdapterError, adapter_sum
from rlbus.schemas import (
    FolderSource,
    GetLoras,
    LoadLora,
    LorasData,
    LoraState,
    LoraView,
    ResultStatus,
    UnloadLora,
    is_lora_name,
    lora_id,
    split_lora_id,
)
from rlbus.workers.journal import digest_of
from rlbus.workers.preconditions import adapter_problem
from rlbus.workers.state import WorkerState
from rlbus.workers.system.calls import Call, OpError
from rlbus.workers.system.dynamo_bodies import fields_of, said
from rlbus.workers.system.summing import Summing

Reply = dict[str, Any]
# Of all the workers in this process.
_SUMMING = Summing()


class Named(NamedTuple):
    """What a caller calls an adapter; without a revision it is the newest."""

    name: str
    revision: int | None


async def load_lora(call: Call) -> Reply:
    """From a folder below the adapter roots. Cancel: an op that has begun goes on."""
    fields = fields_of(call)
    _check_known(fields, "lora_name", "source")
    asked = _named(fields)
    source = fields.get("source")
    if not isinstance(source, dict) or not source:
        raise said("'source' object is required in request")
    _check_known(source, "uri", where="source.")
    uri = source.get("uri")
    if not isinstance(uri, str) or not uri:
        raise said("'source.uri' is required and must be a string")
    path = _path_of(uri)
    checksum = await _checksum(call, path)
    loads = await _loads(call, asked, checksum, FolderSource(path=path))
    result = await call.do(loads)
    name, revision = str(fields["lora_name"]), loads.revision
    return {
        "status": "success",
        "message": f"LoRA adapter '{name}' loaded successfully as {lora_id(asked.name, revision)}",
        "lora_name": name,
        "lora_id": revision,
        "hot_swap": isinstance(result.data, LorasData) and result.data.hot_swap,
    }


async def unload_lora(call: Call) -> Reply:
    """One revision; of a name alone all that are loaded, oldest first. Cancel: an op that has begun goes on."""
    fields = fields_of(call)
    _check_known(fields, "lora_name")
    return await _unload(call, _named(fields))


async def unload_by_path(call: Call) -> Reply:
    """`DELETE /v1/loras/<name>`. Cancel: an op that has begun goes on."""
    return await _unload(call, _named({"lora_name": call.request.path_params["lora_name"]}))


async def list_loras(call: Call) -> Reply:
    """By the engine's own word. Cancel: an op that has begun goes on."""
    result = await call.do(GetLoras())
    assert isinstance(result.data, LorasData)
    loaded = [one for one in result.data.loras if one.state is not LoraState.DRAINING]
    loras = {one.name if one.revision is None else lora_id(one.name, one.revision): one.revision for one in loaded}
    return {"status": "success", "loras": loras, "count": len(loras)}


async def _unload(call: Call, asked: Named) -> Reply:
    known = _repeated(call, asked)
    loaded = await _loaded(call, asked) if known is None else [known]
    for revision in loaded[:-1]:
        await call.do(UnloadLora(name=asked.name, revision=revision), f"r{revision}")
    revision = loaded[-1]
    result = await call.submit(UnloadLora(name=asked.name, revision=revision))
    if result.status is not ResultStatus.OK:
        raise OpError(result)
    name = lora_id(asked.name, revision) if asked.revision else asked.name
    return {
        "status": "success",
        "message": f"LoRA adapter '{name}' unloaded successfully",
        "lora_name": name,
        "lora_id": revision,
    }


def _repeated(call: Call, asked: Named) -> int | None:
    """The revision that an op of this call's name was about, which the journal answers; None: there was no such op."""
    record = call.agent.journal.find(call.name)
    if record is None:
        return None
    state = call.agent.state
    known = {revision for name, revision, _ in state.known_sums if name == asked.name}
    if state.adapter_gone is not None and state.adapter_gone.name == asked.name:
        known.add(state.adapter_gone.revision)
    bodies = (UnloadLora(name=asked.name, revision=revision) for revision in known)
    was = next((body.revision for body in bodies if digest_of(body) == record.digest), None)
    return asked.revision or was or max(known, default=1)


async def _loaded(call: Call, asked: Named) -> list[int]:
    """The revisions that a call is about, oldest first: by the engine's own word, too, as what an agent before this one
    has loaded is there. Cancel: nothing was done.
    """
    own = {(one.name, one.revision) for one in call.agent.state.adapters}
    if asked.revision is not None and (asked.name, asked.revision) in own:
        return [asked.revision]  # also where the engine doesn't say what it has
    listed = (await call.do(GetLoras(), "listed")).data
    assert isinstance(listed, LorasData)
    there = own | {(one.name, one.revision) for one in listed.loras if one.revision is not None}
    found = sorted(revision for name, revision in there if name == asked.name and asked.revision in (None, revision))
    if found:
        return found
    if asked.revision is None and any(one.name == asked.name for one in listed.loras):
        raise said(
            f"LoRA adapter '{asked.name}' has no revision: somebody else has loaded it, past rlbus, and unloads it"
        )
    has = sorted(lora_id(*each) for each in there)
    name = asked.name if asked.revision is None else lora_id(asked.name, asked.revision)
    raise said(f"LoRA adapter '{name}' not found. Available LoRAs: {has}", HTTPStatus.NOT_FOUND)


def _named(fields: dict[str, Any]) -> Named:
    name = fields.get("lora_name")
    if not isinstance(name, str) or not name:
        raise said("'lora_name' is required and must be a string")
    if (both := split_lora_id(name)) is not None:
        return Named(*both)
    if not is_lora_name(name):
        raise said(f"'lora_name' is {name!r}; use letters, digits, _ . - and maybe @revision, as policy@7")
    return Named(name, None)


def _check_known(fields: dict[str, Any], *names: str, where: str = "") -> None:
    unknown = sorted(set(fields) - set(names))
    if unknown:
        raise said(f"there is no field '{where}{unknown[0]}' here")


def _path_of(uri: str) -> str:
    """The folder that a URI means: a plain path, or file:// on this machine."""
    if uri.startswith("/"):
        return uri
    try:
        parts = urlsplit(uri)
        is_folder = parts.scheme == "file" and parts.netloc in ("", "localhost") and not (parts.query or parts.fragment)
    except ValueError:
        is_folder = False
    if not is_folder:
        raise said("'source.uri' has to be file:///FOLDER, below one of this worker's adapter roots (RLBUS_LORA_ROOTS)")
    return unquote(parts.path)


async def _checksum(call: Call, path: str) -> str:
    """Of the files that are there now; the worker copies them, and refuses if they have changed by then."""
    roots = call.agent.config.lora_roots

    def look() -> str:
        # Nothing beyond the roots is read.
        if (problem := adapter_problem(path, roots)) is not None:
            raise said(problem.message)
        return adapter_sum(Path(path)).checksum

    try:
        return await _SUMMING.run(path, look, call.limit_s)
    except AdapterError as exc:
        # As vLLM of a folder that isn't there, or not yet: a shared one may lag.
        raise said(str(exc), HTTPStatus.NOT_FOUND) from exc


async def _loads(call: Call, asked: Named, checksum: str, source: FolderSource) -> LoadLora:
    """What a call asks for, with its revision. Cancel: nothing was done."""

    def as_revision(revision: int) -> LoadLora:
        return LoadLora(name=asked.name, revision=revision, checksum=checksum, source=source)

    if asked.revision is not None:
        return as_revision(asked.revision)
    record = call.agent.journal.find(call.name)
    if record is not None:  # a repeat of a call, whatever came after it; the journal answers
        for revision in _same(call.agent.state, asked.name, checksum):
            if digest_of(as_revision(revision)) == record.digest:
                return as_revision(revision)
    # By the engine's own word, too: what an agent before this one has loaded is there.
    listed = (await call.do(GetLoras(), "listed")).data
    assert isinstance(listed, LorasData)
    return as_revision(_revision_of(call.agent.state, listed.loras, asked.name, checksum))


def _revision_of(state: WorkerState, listed: Sequence[LoraView], name: str, checksum: str) -> int:
    """The revision that these files have here already, if the name means no newer one; else the next. Pure."""
    own_word = [(one.name, one.revision, one.state) for one in state.adapters]
    engines_word = [(one.name, one.revision or 0, one.state) for one in listed]
    there = [(revision, is_in) for found, revision, is_in in (*own_word, *engines_word) if found == name]
    newest = max((revision for revision, is_in in there if is_in is not LoraState.DRAINING), default=0)
    own = max(_same(state, name, checksum), default=0)
    if own and own >= newest:
        return own
    known = (revision for known_name, revision, _ in state.known_sums if known_name == name)
    return max((*known, *(revision for revision, _ in there)), default=0) + 1


def _same(state: WorkerState, name: str, checksum: str) -> set[int]:
    """The revisions of a name that these files have, or had, here."""
    own = {one.revision for one in state.adapters if (one.name, one.checksum) == (name, checksum)}
    return own | {revision for known, revision, found in state.known_sums if (known, found) == (name, checksum)}
