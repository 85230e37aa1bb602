"""Commands that ask the fleet: what they are given is checked before anything is connected, and how they end."""

import pytest
from typer.testing import CliRunner

from rlbus.cli.app import app
from rlbus.cli.output import ExitCode

pytestmark = pytest.mark.unit

# Nobody listens there: whatever looks for the bus ends with 4.
NOWHERE = {"RLBUS_URL": "nats://127.0.0.1:9", "RLBUS_CONNECT_S": "0.2"}


@pytest.mark.parametrize("seconds", ["inf", "nan", "-1"])
@pytest.mark.parametrize(
    "command", [("pause", "--lease"), ("lora", "unload", "policy", "--drain"), ("resume", "--deadline")]
)
def test_a_number_of_seconds_that_is_none_is_wrong_usage(command: tuple[str, ...], seconds: str) -> None:
    """`--lease inf` would be no lease at all."""
    done = CliRunner().invoke(app, [*command, seconds], env=NOWHERE)
    assert done.exit_code == ExitCode.USAGE, done.stderr
    assert command[-1] in done.stderr
