"""Every public coroutine says in its docstring what it leaves when it is cancelled: `Cancel:`, or whose it has."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parent.parent
PACKAGES = ("rlbus", "workers", "controller")
# "Cancel: ...", also as "Cancel (every verb): ...", "Cancel, of every coroutine: ..." and "Raises, Cancel: see pause".
SAYS = re.compile(r"\bCancel(?: \([a-z ]+\)| or failure|, of every coroutine)?: ?\S")
# "See `Engine`." is the method of that name there; "See `Kv.get`." names another.
SEE = re.compile(r"\b[Ss]ee `?(?P<owner>[A-Z]\w*)(\.(?P<method>\w+))?`?")


@dataclass(frozen=True)
class Coroutine:
    """A public coroutine, and where its words are."""

    place: str
    owner: str | None
    name: str
    doc: str
    # The docstring of its class, which may speak for all of its methods.
    owner_doc: str

    @property
    def says(self) -> bool:
        """Whether it, or its class for all of them, says what a cancellation leaves."""
        return SAYS.search(self.doc) is not None or SAYS.search(self.owner_doc) is not None


def coroutines(source: str, place: str) -> Iterator[Coroutine]:
    """The public ones of a module."""
    tree = ast.parse(source)
    owners: list[ast.Module | ast.ClassDef] = [tree]
    owners += [node for node in tree.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]
    for owner in owners:
        owner_doc = ast.get_docstring(owner) or "" if isinstance(owner, ast.ClassDef) else ""
        for node in owner.body:
            if not isinstance(node, ast.AsyncFunctionDef) or node.name.startswith("_"):
                continue
            if any(isinstance(d, ast.Name) and d.id == "overload" for d in node.decorator_list):
                continue
            name = owner.name if isinstance(owner, ast.ClassDef) else None
            where = f"{place}:{node.lineno} {'' if name is None else name + '.'}{node.name}"
            yield Coroutine(where, name, node.name, ast.get_docstring(node) or "", owner_doc)


def is_told(one: Coroutine, known: dict[tuple[str, str], Coroutine], depth: int = 3) -> bool:
    """Whether it says so, or whoever it refers to does."""
    if one.says or depth == 0:
        return one.says
    for found in SEE.finditer(one.doc):
        other = known.get((found["owner"], found["method"] or one.name))
        if other is not None and is_told(other, known, depth - 1):
            return True
    return False


def silent(found: list[Coroutine]) -> list[str]:
    """Those that don't say it."""
    known = {(one.owner, one.name): one for one in found if one.owner is not None}
    return [one.place for one in found if not is_told(one, known)]


def test_every_public_coroutine_says_what_a_cancellation_leaves() -> None:
    """In rlbus, workers and controller; what is private is its caller's business."""
    found: list[Coroutine] = []
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            if not any(parent.is_symlink() for parent in path.parents):
                found += coroutines(path.read_text(), str(path.relative_to(ROOT)))
    assert len(found) > 150
    assert silent(found) == []


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ('async def go():\n    """Go."""', ["m:1 go"]),
        ('async def go():\n    """Go. Cancel: leaves nothing."""', []),
        ('async def go():\n    """Go. Cancel:"""', ["m:1 go"]),
        ('async def _go():\n    """Go."""', []),
        ("async def go():\n    pass", ["m:1 go"]),
        ('class A:\n    async def go(self):\n        """Go."""', ["m:2 A.go"]),
        ('class A:\n    """All. Cancel: nothing."""\n    async def go(self):\n        """Go."""', []),
        ('class _A:\n    async def go(self):\n        """Go."""', []),
        ('class A:\n    async def go(self):\n        """See `B`."""', ["m:2 A.go"]),
        (
            'class A:\n    async def go(self):\n        """See `B`."""\n'
            'class B:\n    async def go(self):\n        """Cancel: nothing."""',
            [],
        ),
        (
            'class A:\n    async def go(self):\n        """See `B.run`."""\n'
            'class B:\n    async def run(self):\n        """Run."""',
            ["m:2 A.go", "m:5 B.run"],
        ),
    ],
)
def test_the_check_finds_those_that_say_nothing(source: str, expected: list[str]) -> None:
    """Planted ones, in every shape that is read."""
    assert silent(list(coroutines(source, "m"))) == expected
