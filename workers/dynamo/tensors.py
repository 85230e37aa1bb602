"""Which checkpoint tensors the model of a Dynamo worker is made of: the list against which every update is checked."""

import json
import logging
from pathlib import Path

from rlbus.files import read_file
from rlbus.workers.checkpoint import CheckpointError, read_folder
from rlbus.workers.vllm_server.checkpoint import HEAD, ExpectedTensors, expect

_log = logging.getLogger("rlbus.workers")


def model_tensors(model: str, folder: Path | None) -> ExpectedTensors | None:
    """The tensors of the checkpoint in `folder`, or else in the folder or in the local hub cache that `model` names.

    None, and why in the log, if there is none: then no update could be checked. Blocking: call it in a thread.
    """
    try:
        found = _folder(model) if folder is None else folder
        tensors = read_folder(found)
        is_tied = _is_head_tied(found, all(spec.name != HEAD for spec in tensors))
        return expect(tensors, is_head_tied=is_tied, source=f"the checkpoint in {found}")
    except CheckpointError as exc:
        text = "the tensors of Dynamo's model can't be told, so updates are off; name its folder with --model-dir: %s"
        _log.warning(text, exc)
        return None


def _folder(model: str) -> Path:
    path = Path(model)
    if model and path.is_dir():
        return path
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(model, local_files_only=True))
    except Exception as exc:  # a missing library among them, and any error of it
        raise CheckpointError(model, "is no folder here, and isn't in the local cache of the hub") from exc


def _is_head_tied(folder: Path, default: bool) -> bool:
    """What the configuration says; `default` where it leaves that to the kind of model."""
    try:
        config = json.loads(read_file(folder / "config.json"))
    except (OSError, ValueError) as exc:
        raise CheckpointError(str(folder / "config.json"), "can't be read") from exc
    texts = config.get("text_config") if isinstance(config, dict) else None
    both = {**config, **texts} if isinstance(texts, dict) else config
    return bool(both.get("tie_word_embeddings", default)) if isinstance(both, dict) else default
