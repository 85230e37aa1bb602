"""Which checkpoint tensors the model that vLLM serves is made of: the list against which every update is checked."""

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlbus.files import read_file
from rlbus.schemas import TensorSpec
from rlbus.workers.checkpoint import CheckpointError, read_folder
from rlbus.workers.vllm_server.checkpoint import HEAD, ExpectedTensors, describe, expect

_log = logging.getLogger("rlbus.workers")


def expected_tensors(model_config: Any) -> ExpectedTensors | None:
    """The tensors of the served model; None when they can't be known, and no update could be checked.

    Read from the headers of its checkpoint. A model without one (dummy weights) is built by transformers on the meta
    device instead, without memory. Blocking, up to seconds: call it in a thread.
    """
    is_tied = bool(getattr(model_config.hf_text_config, "tie_word_embeddings", False))
    try:
        folder = checkpoint_folder(model_config.model, model_config.revision)
        return expect(read_folder(folder), is_head_tied=is_tied, source=f"the checkpoint in {folder}")
    except CheckpointError as exc:
        _log.info("the model's tensors are taken from its configuration, since %s", exc)
    try:
        return _from_config(model_config, is_tied)
    except Exception as exc:  # noqa: BLE001 - transformers raises anything; said in the log, and the routes are missing
        _log.warning("the tensors of %s can't be told, so updates over a group are off: %s", model_config.model, exc)
        return None


def expected_of(model: str, revision: str | None = None) -> ExpectedTensors | None:
    """The same for whoever knows the model by its name only; None, with the reason in the log, without its files here.

    Blocking, up to seconds: call it in a thread. Needs neither torch nor vLLM.
    """
    try:
        folder = checkpoint_folder(model, revision)
        tensors = read_folder(folder)
        return expect(tensors, is_head_tied=_is_head_tied(folder, tensors), source=f"the checkpoint in {folder}")
    except CheckpointError as exc:
        _log.warning("the tensors of %s can't be told, so updates are off: %s", model, exc)
        return None


def _is_head_tied(folder: Path, tensors: Sequence[TensorSpec]) -> bool:
    """By the configuration; where that doesn't say, by whether the head is in the checkpoint."""
    try:
        config = json.loads(read_file(folder / "config.json"))
        is_tied = {**config, **config.get("text_config", {})}.get("tie_word_embeddings")
    except (OSError, ValueError, AttributeError, TypeError) as exc:
        raise CheckpointError(str(folder / "config.json"), f"can't be read ({type(exc).__name__})") from exc
    return bool(is_tied) if is_tied is not None else all(spec.name != HEAD for spec in tensors)


def checkpoint_folder(model: str, revision: str | None) -> Path:
    """Where the model's files are. A name on a hub is looked up in the local cache only: vLLM has loaded it.

    Raises:
        CheckpointError: there are none on this machine.
    """
    path = Path(model)
    if path.is_dir():
        return path
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(model, revision=revision, local_files_only=True))
    except Exception as exc:
        raise CheckpointError(model, "is no folder, and isn't in the local cache") from exc


def _from_config(model_config: Any, is_tied: bool) -> ExpectedTensors:
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config.hf_config, dtype=model_config.dtype)
    state = model.state_dict()
    specs = describe((name, str(tensor.dtype), tuple(tensor.shape)) for name, tensor in state.items())
    return expect(specs, is_head_tied=is_tied, source="the model's configuration")
