"""Which checkpoint tensors the model that vLLM serves is made of: the list against which every update is checked."""

import logging
from pathlib import Path
from typing import Any

from rlbus.workers.checkpoint import CheckpointError
from rlbus.workers.vllm_server.checkpoint import ExpectedTensors, describe, expect, read_folder

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


def checkpoint_folder(model: str, revision: str | None) -> Path:
    """Where the model's files are. A name on a hub is looked up in the local cache only: vLLM has loaded it.

    Raises:
        CheckpointError: there are none on this machine.
    """
    path = Path(model)
    if path.is_dir():
        return path
    from huggingface_hub import snapshot_download

    try:
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
