"""Engines whose weights can be named without loading any (`LabelEngine`)."""

from typing import cast

import pytest

from rlbus.schemas import Version
from rlbus.workers.engines.contract import CaseRunner, OpenedEngine
from rlbus.workers.engines.label import LabelEngine

pytestmark = pytest.mark.engine


def test_an_engine_calls_its_weights_what_it_is_told(runner: CaseRunner) -> None:
    """What it says of itself follows, and nothing else changes."""

    async def check(opened: OpenedEngine) -> None:
        if "set_weight_version" not in opened.engine.info.routes:
            return
        engine = cast(LabelEngine, opened.engine)
        await engine.label_weights(Version(incarnation=3, step=9))
        assert (await opened.engine.observe()).weight_version == "3.9"
        await engine.label_weights(Version(step=1))
        assert (await opened.engine.observe()).weight_version == "0.1"

    runner.run(check)
