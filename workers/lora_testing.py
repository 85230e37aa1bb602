"""For tests about adapters: files of one, and a worker that may read them."""

from pathlib import Path
from typing import Any

from rlbus.adapter import CONFIG_FILE, WEIGHTS_FILE, adapter_sum
from rlbus.schemas import FolderSource, LoadLora
from rlbus.workers.config import AgentConfig


def fake_adapter(folder: Path, content: str) -> Path:
    """Files that the fake engine takes for an adapter; other `content`, another checksum."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG_FILE).write_text("{}")
    (folder / WEIGHTS_FILE).write_text(content)
    return folder


def load_of(folder: Path, revision: int, name: str = "policy", **options: bool) -> LoadLora:
    """The command that loads what is in `folder`."""
    source = FolderSource(path=str(folder))
    return LoadLora(name=name, revision=revision, checksum=adapter_sum(folder).checksum, source=source, **options)


def config_for(root: Path, **settings: Any) -> AgentConfig:
    """Settings of an agent that may load adapters from below `root`, and keeps its copies there, too."""
    return AgentConfig(lora_roots=(str(root),), lora_cache_dir=str(root / "cache"), **settings)
