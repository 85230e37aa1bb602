"""What is looked up outside of the state before a command is accepted."""

from pathlib import Path

import pytest

from rlbus.schemas import FaultCode, TensorSpec
from rlbus.workers.engines.fake import DEFAULT_TENSORS, FakeEngine
from rlbus.workers.preconditions import manifest_problem, path_problem

pytestmark = pytest.mark.unit


def test_path_must_be_below_a_root_whatever_its_spelling(tmp_path: Path) -> None:
    """Links and dots are followed before the comparison; a root's sibling with the same beginning is outside."""
    root = tmp_path / "root"
    (root / "in").mkdir(parents=True)
    (tmp_path / "root2").mkdir()
    (root / "out").symlink_to(tmp_path / "root2")
    roots = (str(root),)
    assert path_problem(str(root / "in"), roots) is None
    assert path_problem(str(root / "not-there-yet"), roots) is None
    assert path_problem(f"{root}/a\0b", roots) is not None
    for bad in (str(tmp_path / "root2"), str(root / "out" / "x"), str(root / "in/../../root2"), "in", "/", ""):
        problem = path_problem(bad, roots)
        assert problem is not None
        assert problem.code is FaultCode.WRONG_STATE
    assert path_problem(str(root / "in"), ()) is not None


def test_manifest_must_fit_the_model_and_its_checksums_a_message() -> None:
    """The first that doesn't is named, and nothing else was asked of the engine."""
    engine = FakeEngine()
    assert manifest_problem(engine, DEFAULT_TENSORS, 1_000_000) is None
    too_small = manifest_problem(engine, DEFAULT_TENSORS, 100)
    assert too_small is not None
    assert too_small.code is FaultCode.TOO_LARGE
    extra = (*DEFAULT_TENSORS, TensorSpec(name="bias", dtype="float32", shape=(1,)))
    unexpected = manifest_problem(engine, extra, 1_000_000)
    assert unexpected is not None
    assert (unexpected.code, unexpected.detail["tensor"]) == (FaultCode.MANIFEST_MISMATCH, "bias")


def test_engine_that_raises_while_checking_is_a_refusal(caplog: pytest.LogCaptureFixture) -> None:
    """An adapter's bug changes nothing, and shows only its type."""
    engine = FakeEngine()

    def broken(_: object) -> None:
        raise ZeroDivisionError("secret")

    engine.check_manifest = broken  # type: ignore[method-assign, assignment]
    problem = manifest_problem(engine, DEFAULT_TENSORS, 1_000_000)
    assert problem is not None
    assert (problem.code, problem.detail["error"]) == (FaultCode.ENGINE_FAILED, "ZeroDivisionError")
    assert "secret" not in problem.message
    assert "secret" in caplog.text
