"""`rlbus lora` on a real server, with a real controller and fake workers as processes."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlbus.adapter import CONFIG_FILE, WEIGHTS_FILE, adapter_sum
from rlbus.server import EmbeddedServer
from rlbus.sync import LoopThread, Trainer
from rlbus.transfer.fake import FakePlane
from tests.integration.test_cli import NAMESPACE, Process, rlbus, until_listed

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server, a controller, and two fake workers that can't read any folder by themselves."""
    loop = LoopThread("test-server")
    server = EmbeddedServer()
    loop.call(server.__aenter__())
    processes = [Process("controller", "--json", url=server.url)]
    processes += [
        Process("worker", "fake", "--no-restart", "--json", "--instance-id", str(n), url=server.url) for n in (1, 2)
    ]
    try:
        for process in processes:
            process.document()
        until_listed(server.url, 2)
        yield server.url
    finally:
        for process in processes:
            process.kill()
        loop.call(server.__aexit__(None, None, None))
        loop.stop()


def adapter(folder: Path, text: str) -> Path:
    folder.mkdir()
    (folder / CONFIG_FILE).write_text('{"peft_type": "LORA", "r": 8, "target_modules": ["q_proj"]}')
    (folder / WEIGHTS_FILE).write_bytes(text.encode() * 100_000)
    return folder


def test_load_list_and_unload_from_the_command_line(url: str, tmp_path: Path) -> None:
    """Tables for people, documents for scripts, codes for both."""
    folder = adapter(tmp_path / "a", "one")
    loaded = rlbus("lora", "load", "policy", "--from", str(folder), "--json", url=url)
    assert (loaded.code, loaded.document["status"]) == (0, "ok")
    assert loaded.document["lora"]["ids"] == ["policy@1"]
    assert loaded.document["lora"]["checksum"] == adapter_sum(folder).checksum
    again = rlbus("lora", "load", "policy", "--from", str(folder), "--revision", "1", url=url)
    assert again.code == 0
    assert "adapter policy@1" in again.stdout
    listed = rlbus("lora", "list", url=url)
    assert "the bus's store" in listed.stdout
    assert "backend/1: policy@1; 1 of" in listed.stdout
    document = rlbus("lora", "list", "--json", url=url).document
    assert [(one["name"], one["revision"]) for one in document["loras"]] == [("policy", 1)]
    assert "adapters: policy@1" in rlbus("status", url=url).stdout
    assert "lora_load policy@1" in rlbus("history", url=url).stdout
    gone = rlbus("lora", "unload", "policy@1", "--json", url=url)
    assert (gone.code, gone.document["lora"]["ids"]) == (0, ["policy@1"])
    assert "has no adapters" in rlbus("lora", "list", url=url).stdout


def test_what_is_refused_ends_with_its_code_and_one_line(url: str, tmp_path: Path) -> None:
    """3: nothing changed; 2: wrong usage; 1: a folder that is no adapter."""
    one, two = adapter(tmp_path / "1", "one"), adapter(tmp_path / "2", "two")
    assert rlbus("lora", "load", "judge", "--from", str(one), "--revision", "5", url=url).code == 0
    taken = rlbus("lora", "load", "judge", "--from", str(two), "--revision", "5", url=url)
    assert (taken.code, taken.stdout) == (3, "")
    assert "judge@5 stands for other bytes" in taken.stderr
    folder = rlbus("lora", "load", "judge", "--from", f"file://{two}", url=url)
    assert folder.code == 3
    assert "RLBUS_LORA_ROOTS" in folder.stderr
    for argv, part in (
        (("load", "judge@6", "--from", str(one)), "give the revision apart"),
        (("load", "judge", "--from", "s3://bucket/judge"), "file:///DIR"),
        (("unload", "judge@"), "NAME@N"),
    ):
        done = rlbus("lora", *argv, url=url)
        assert (done.code, part in done.stderr) == (2, True), done.stderr
    (tmp_path / "empty").mkdir()
    for name, ends in (("nowhere", (2, "ConfigError")), ("empty", (1, "AdapterError"))):
        nothing = rlbus("lora", "load", "judge", "--from", str(tmp_path / name), "--json", url=url)
        assert (nothing.code, nothing.document["error"]["code"]) == ends
    assert rlbus("lora", "unload", "judge", url=url).code == 0


def test_a_trainer_without_asyncio_loads_and_unloads(url: str, tmp_path: Path) -> None:
    """One adapter a step, the newest under the bare name; older ones make room by themselves."""
    with Trainer(url, namespace=NAMESPACE, plane=FakePlane()) as trainer:
        trainer.wait_ready(num_workers=2)
        for step in range(1, 7):
            report = trainer.load_lora("actor", adapter(tmp_path / str(step), str(step)))
            assert report.lora is not None
            assert report.lora.ids == (f"actor@{step}",)
        assert [one.revision for one in trainer.status().loras] == [3, 4, 5, 6]
        report = trainer.unload_lora("actor")
        assert report.lora is not None
        assert len(report.lora.ids) == 4
    assert json.loads(rlbus("lora", "list", "--json", url=url).stdout)["loras"] == []
