"""The images of docker-compose.yml on a machine whose containers reach no registry and no index: a base image that is
pulled or made of Debian, and wheels that are fetched out here, once.
"""

import hashlib
import os
import sys
import tempfile
from pathlib import Path

from tests.compose.daemon import ROOT, Docker, SetupError, install, remove, run

DEFAULT_BASE = "python:3.11-slim-bookworm"
OWN_BASE = "rlbus-base:bookworm"
# Of both.
PYTHON = "3.11"
WHEELS = ROOT / "docker" / "wheels"
# Has no wheel on the index; it is plain Python, so that ours fits any.
SOURCE_ONLY = ("nkeys",)
CACHE = ROOT / ".compose"
IMAGE = "rlbus-test"
PULL_S = 120.0
DEBOOTSTRAP_S = 600.0
FETCH_S = 1800.0
BUILD_S = 1200.0
IMPORT_S = 120.0


def build(docker: Docker, project: str) -> dict[str, str]:
    """Have both images; the variables that docker-compose.yml needs to use them. Raises: SetupError."""
    fetch_wheels()
    env = {"BASE_IMAGE": base_image(docker), "PIP_OPTIONS": "--no-index", "RLBUS_IMAGE": IMAGE}
    docker.compose("--project-name", project, "build", env=env, limit_s=BUILD_S)
    return env


def fetch_wheels() -> None:
    """All that rlbus needs, into docker/wheels, unless what is there was fetched for the same list."""
    needs = run((sys.executable, "docker/needs.py", "torch"), FETCH_S, cwd=ROOT)
    wanted = hashlib.sha256(f"{PYTHON}\n{needs}\n{(ROOT / 'constraints.txt').read_text()}".encode()).hexdigest()
    stamp = WHEELS / ".fetched"
    if stamp.exists() and stamp.read_text() == wanted:
        return
    stamp.unlink(missing_ok=True)
    for old in WHEELS.glob("*.whl"):
        old.unlink()
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as listed:
        listed.write(f"{needs}\nsetuptools>=77\nwheel\n")
        listed.flush()
        pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
        made = ("wheel", "--no-deps", "--wheel-dir", str(WHEELS), "-c", "constraints.txt", *SOURCE_ONLY)
        run((*pip, *made), FETCH_S, cwd=ROOT)
        fetched = ("download", "--dest", str(WHEELS), "--find-links", str(WHEELS), "-c", "constraints.txt")
        kind = ("--only-binary", ":all:", "--python-version", PYTHON)
        run((*pip, *fetched, *kind, "-r", listed.name), FETCH_S, cwd=ROOT)
    stamp.write_text(wanted)


def base_image(docker: Docker) -> str:
    """A base image with Python: the one that BASE_IMAGE names, the default one, or one that debootstrap makes."""
    if given := os.environ.get("BASE_IMAGE"):
        return given
    for name in (DEFAULT_BASE, OWN_BASE):
        if docker.run("images", "--quiet", name).strip():
            return name
    try:
        docker.run("pull", DEFAULT_BASE, limit_s=PULL_S)
    except SetupError as exc:
        print(f"{DEFAULT_BASE} can't be pulled, so a base image is made of Debian: {exc}")
    else:
        return DEFAULT_BASE
    archive = CACHE / "base.tar"
    if not archive.exists():
        _debootstrap(archive)
    docker.run("import", str(archive), OWN_BASE, limit_s=IMPORT_S)
    return OWN_BASE


def _debootstrap(archive: Path) -> None:
    if os.geteuid() != 0:
        raise SetupError(f"{DEFAULT_BASE} can't be pulled, and debootstrap needs root; set BASE_IMAGE, or be root")
    install("debootstrap")
    archive.parent.mkdir(exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="rlbus-base-"))
    try:
        what = ("--variant=minbase", "--include=python3,python3-venv,ca-certificates", "bookworm", str(folder))
        run(("debootstrap", *what), DEBOOTSTRAP_S)
        partial = archive.with_suffix(".partial")
        leave_out = ("--exclude=./var/cache/apt/*", "--exclude=./var/lib/apt/lists/*", "--exclude=./dev/*")
        run(("tar", "-C", str(folder), *leave_out, "-cf", str(partial), "."), IMPORT_S)
        partial.rename(archive)
    finally:
        # It has mounted /proc in there, and one that fails doesn't take it away.
        remove(folder)
