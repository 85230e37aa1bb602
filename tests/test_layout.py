"""The house is as it is described: who may import whom, which packages exist, what `import rlbus` costs."""

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parent.parent
LINKED = ("workers", "controller", "schemas")
MARKERS = {"unit", "integration", "engine", "faults", "peers", "compose", "gpu"}
HEAVY = {"torch", "vllm", "transformers", "safetensors", "numpy", "tokenizers"}
MAX_LINES = 500

# Package -> packages of ours that it may import. The longest matching prefix on either side decides. `rlbus.cli` and
# `rlbus.demo` put the pieces together, so they may import all.
MAY_IMPORT = {
    "rlbus.schemas": {"rlbus.schemas"},
    "rlbus": {"rlbus", "rlbus.schemas", "rlbus.transfer"},
    "rlbus.transfer": {"rlbus", "rlbus.schemas", "rlbus.transfer"},
    "rlbus.workers": {"rlbus", "rlbus.schemas", "rlbus.transfer", "rlbus.workers"},
    "rlbus.controller": {"rlbus", "rlbus.schemas", "rlbus.transfer", "rlbus.controller"},
    "rlbus.cli": {
        "rlbus",
        "rlbus.schemas",
        "rlbus.transfer",
        "rlbus.workers",
        "rlbus.controller",
        "rlbus.cli",
        "rlbus.demo",
    },
    "rlbus.__main__": {"rlbus.cli"},
    "rlbus.demo": {
        "rlbus",
        "rlbus.schemas",
        "rlbus.transfer",
        "rlbus.workers",
        "rlbus.controller",
        "rlbus.cli",
        "rlbus.demo",
    },
}
# The only places that import these at all.
ONLY_IN = {
    "nats": {"rlbus._nats"},
    "torch": {
        "rlbus.transfer",
        "rlbus.demo",
        "rlbus.workers.torch_lm",
        "rlbus.workers.engines.torch_engine",
        "rlbus.workers.engines.torch_rank",
        "rlbus.workers.vllm_server",
    },
    "vllm": {"rlbus.workers.vllm_server"},
    # It maps files: the process stands still while their disk hangs, and dies when they are cut (`rlbus.files`).
    "safetensors": {"rlbus.workers.torch_lm.make"},
    "grpc": {"rlbus.workers.vllm_grpc.control"},
    "google": {"rlbus.workers.vllm_grpc.messages"},
}


def modules() -> Iterator[tuple[str, Path]]:
    """(dotted name, file) of every module that is installed."""
    for path in sorted((ROOT / "rlbus").rglob("*.py")):
        if not any(part in LINKED for part in path.relative_to(ROOT / "rlbus").parts[:1]):
            yield _dotted(path.relative_to(ROOT)), path
    for top in LINKED:
        for path in sorted((ROOT / top).rglob("*.py")):
            yield "rlbus." + _dotted(path.relative_to(ROOT)), path


def _dotted(relative: Path) -> str:
    name = ".".join(relative.with_suffix("").parts)
    return name.removesuffix(".__init__")


def _within(name: str, prefixes: object) -> str | None:
    assert isinstance(prefixes, dict | set)
    fitting = [p for p in prefixes if name == p or name.startswith(p + ".")]
    return max(fitting, key=len) if fitting else None


def imports_of(path: Path) -> set[str]:
    """Every module that a file imports, also inside functions and for typing only."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module)
            found |= {f"{node.module}.{a.name}" for a in node.names if node.module == "rlbus"}
    return found


def test_imports_go_one_way() -> None:
    """schemas <- rlbus <- workers, controller; the last two never import each other."""
    wrong = []
    for name, path in modules():
        owner = _within(name, MAY_IMPORT)
        assert owner is not None, name
        for imported in imports_of(path):
            target = _within(imported, MAY_IMPORT)
            if target is not None and target not in MAY_IMPORT[owner]:
                wrong.append(f"{name} imports {imported}")
    assert wrong == []


def test_foreign_libraries_are_imported_only_at_their_seam() -> None:
    """nats, torch and vllm stay where the seam to them is."""
    wrong = []
    for name, path in modules():
        for imported in imports_of(path):
            allowed = ONLY_IN.get(imported.split(".")[0])
            if allowed is not None and _within(name, allowed) is None:
                wrong.append(f"{name} imports {imported}")
    assert wrong == []


def test_the_links_lead_to_the_folders() -> None:
    """Tools that read the tree find the same packages as an installation does."""
    for top in LINKED:
        link = ROOT / "rlbus" / top
        assert link.is_symlink()
        assert link.resolve() == ROOT / top


def test_the_package_list_names_every_package() -> None:
    """A package that is missing from pyproject.toml would be missing from the wheel, silently."""
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = {name for name, path in modules() if path.name == "__init__.py"}
    assert set(config["tool"]["setuptools"]["packages"]) == packages


def test_importing_rlbus_is_light() -> None:
    """`import rlbus` and the controller take in neither torch nor vllm, nor what comes with them."""
    code = (
        "import sys, rlbus, rlbus.schemas, rlbus.client, rlbus.controller.app, rlbus.workers.agent, rlbus.cli.app;"
        f"print(sorted({HEAVY!r} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/")
    assert out.stdout.strip() == "[]"


def test_the_bare_folder_names_are_not_importable_from_elsewhere() -> None:
    """Users import `rlbus...` only; `import workers` finds nothing of ours."""
    for top in LINKED:
        code = f"import importlib.util, sys; s = importlib.util.find_spec({top!r}); print(s.origin if s else None)"
        out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/")
        assert str(ROOT) not in out.stdout


def test_nothing_in_the_tree_imports_a_bare_folder_name() -> None:
    """`import schemas` works from the root by accident, as a second copy of the module."""
    for path in (*ROOT.glob("rlbus/**/*.py"), *ROOT.glob("tests/**/*.py"), *ROOT.glob("examples/*.py")):
        assert not {i.split(".")[0] for i in imports_of(path)} & set(LINKED), path


def test_files_stay_readable_in_one_sitting() -> None:
    """A longer file lacks a concept of its own."""
    paths = [path for _, path in modules()] + sorted(ROOT.glob("tests/**/*.py"))
    assert {str(p.relative_to(ROOT)): n for p in paths if (n := len(p.read_text().splitlines())) > MAX_LINES} == {}


def test_every_public_definition_is_documented() -> None:
    """Public modules, classes and functions say what they are for."""
    bare = []
    for name, path in modules():
        tree = ast.parse(path.read_text())
        if ast.get_docstring(tree) is None:
            bare.append(name)
        for node in tree.body:
            members = node.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_") else []
            for item in (node, *members):
                if (
                    isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
                    and not item.name.startswith("_")
                    and ast.get_docstring(item) is None
                ):
                    bare.append(f"{name}.{item.name}")
    assert bare == []


def test_every_test_module_has_exactly_one_type_marker() -> None:
    """So that a run can be chosen by what it needs."""
    wrong = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        assigned = [
            ast.unparse(node.value)
            for node in ast.parse(path.read_text()).body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
        ]
        found = [m for m in MARKERS if any(f"mark.{m}" in text for text in assigned)]
        if len(found) != 1:
            wrong.append(f"{path.relative_to(ROOT)}: {found}")
    assert wrong == []


def test_every_test_says_what_it_expects() -> None:
    """A docstring on each test function."""
    bare = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
                and node.name.startswith("test_")
                and ast.get_docstring(node) is None
            ):
                bare.append(f"{path.relative_to(ROOT)}::{node.name}")
    assert bare == []
