"""What all wire messages have in common."""

import dataclasses
import inspect
import types

import msgspec
import pytest

from rlbus import schemas

pytestmark = pytest.mark.unit

STRUCTS = [c for _, c in inspect.getmembers(schemas, inspect.isclass) if issubclass(c, msgspec.Struct)]


@pytest.mark.parametrize("struct", STRUCTS, ids=lambda c: c.__name__)
def test_every_struct_is_a_frozen_wire_message_that_ignores_unknown_fields(struct: type[msgspec.Struct]) -> None:
    """Safe to share between tasks, and to receive from a newer peer; documented."""
    config = struct.__struct_config__
    assert issubclass(struct, schemas.Wire)
    assert config.frozen
    assert not config.forbid_unknown_fields
    assert inspect.getdoc(struct)
    assert not dataclasses.is_dataclass(struct)


def test_the_package_exports_every_public_name_of_its_modules() -> None:
    """Nobody has to know the module. ruff sees to the order of the list."""
    missing = [name for name in schemas.__all__ if not hasattr(schemas, name)]
    assert missing == []
    public = {
        name
        for module in vars(schemas).values()
        if isinstance(module, types.ModuleType) and module.__name__.startswith("rlbus.schemas.")
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    }
    assert public - set(schemas.__all__) == set()
