"""`rlbus lora` on a real server, with a real controller and fake workers as processes."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlbus.adapter import CONFIG_FILE, WEIGHTS_FILE, adapter_sum
from rlbus.server import EmbeddedServer
from rlbus.sync import LoopThread, Trainer
from rlbus.transfer.fake import FakePlane
from tests.integration.commands import NAMESPACE, asked, done_well, in_one_term, program, rlbus, until_listed

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server, a controller, and two fake workers that can't read any folder by themselves."""
    loop = LoopThread("test-server")
    server = EmbeddedServer()
    loop.call(server.__aenter__())
    processes = [program("controller", "--json", url=server.url)]
    processes += [
        program("worker", "fake", "--no-restart", "--json", "--instance-id", str(n), url=server.url) for n in (1, 2)
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


# Of adapters: what was loaded under one is never replaced by other bytes.
names = (f"policy{n}" for n in itertools.count())


def fresh(url: str, tmp_path: Path) -> tuple[str, Path]:
    """A name for an adapter, and a folder, for a try; whatever one before has left is gone."""
    for one in asked(url, "lora", "list")["loras"]:
        rlbus("lora", "unload", f"{one['name']}@{one['revision']}", url=url)
    name = next(names)
    (tmp_path / name).mkdir()
    return name, tmp_path / name


def adapter(folder: Path, text: str) -> Path:
    folder.mkdir()
    (folder / CONFIG_FILE).write_text('{"peft_type": "LORA", "r": 8, "target_modules": ["q_proj"]}')
    (folder / WEIGHTS_FILE).write_bytes(text.encode() * 100_000)
    return folder


@in_one_term(2)
def test_load_list_and_unload_from_the_command_line(url: str, tmp_path: Path) -> None:
    """Tables for people, documents for scripts, codes for both."""
    name, own = fresh(url, tmp_path)
    folder = adapter(own / "a", "one")
    loaded = done_well(url, "lora", "load", name, "--from", str(folder))
    assert loaded["status"] == "ok"
    assert loaded["lora"]["ids"] == [f"{name}@1"]
    assert loaded["lora"]["checksum"] == adapter_sum(folder).checksum
    again = rlbus("lora", "load", name, "--from", str(folder), "--revision", "1", url=url)
    assert again.code == 0
    assert f"adapter {name}@1" in again.stdout
    listed = rlbus("lora", "list", url=url)
    assert "the bus's store" in listed.stdout
    assert f"backend/1: {name}@1; 1 of" in listed.stdout
    document = asked(url, "lora", "list")
    assert [(one["name"], one["revision"]) for one in document["loras"]] == [(name, 1)]
    assert f"adapters: {name}@1" in rlbus("status", url=url).stdout
    assert f"lora_load {name}@1" in rlbus("history", url=url).stdout
    gone = done_well(url, "lora", "unload", f"{name}@1")
    assert gone["lora"]["ids"] == [f"{name}@1"]
    assert "has no adapters" in rlbus("lora", "list", url=url).stdout


@in_one_term(2)
def test_what_is_refused_ends_with_its_code_and_one_line(url: str, tmp_path: Path) -> None:
    """3: nothing changed; 2: wrong usage; 1: a folder that is no adapter."""
    name, own = fresh(url, tmp_path)
    one, two = adapter(own / "1", "one"), adapter(own / "2", "two")
    done_well(url, "lora", "load", name, "--from", str(one), "--revision", "5")
    taken = rlbus("lora", "load", name, "--from", str(two), "--revision", "5", url=url)
    assert (taken.code, taken.stdout) == (3, "")
    assert f"{name}@5 stands for other bytes" in taken.stderr
    folder = rlbus("lora", "load", name, "--from", f"file://{two}", url=url)
    assert folder.code == 3
    assert "RLBUS_LORA_ROOTS" in folder.stderr
    for argv, part in (
        (("load", f"{name}@6", "--from", str(one)), "give the revision apart"),
        (("load", name, "--from", "s3://bucket/policy"), "file:///DIR"),
        (("unload", f"{name}@"), "NAME@N"),
    ):
        done = rlbus("lora", *argv, url=url)
        assert (done.code, part in done.stderr) == (2, True), done.stderr
    (own / "empty").mkdir()
    for text, ends in (("nowhere", (2, "ConfigError")), ("empty", (1, "AdapterError"))):
        nothing = rlbus("lora", "load", name, "--from", str(own / text), "--json", url=url)
        assert (nothing.code, nothing.document["error"]["code"]) == ends
    done_well(url, "lora", "unload", name)


@in_one_term(2)
def test_a_trainer_without_asyncio_loads_and_unloads(url: str, tmp_path: Path) -> None:
    """One adapter a step, the newest under the bare name; older ones make room by themselves."""
    name, own = fresh(url, tmp_path)
    with Trainer(url, namespace=NAMESPACE, plane=FakePlane()) as trainer:
        trainer.wait_ready(num_workers=2)
        for step in range(1, 7):
            report = trainer.load_lora(name, adapter(own / str(step), str(step)))
            assert report.lora is not None
            assert report.lora.ids == (f"{name}@{step}",)
        assert [one.revision for one in trainer.status().loras] == [3, 4, 5, 6]
        report = trainer.unload_lora(name)
        assert report.lora is not None
        assert len(report.lora.ids) == 4
    assert asked(url, "lora", "list")["loras"] == []
