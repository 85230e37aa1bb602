"""The frontend that has to show an adapter: what may name it."""

import pytest

from rlbus.controller.frontend import Frontend
from rlbus.errors import ConfigError

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("nonsense", "nonsense"),
        ("ftp://h:1", "ftp://h:1"),
        ("http://[", "http://["),
        ("http://me:hunter2@h:1", "***@h:1"),
    ],
)
def test_what_is_no_url_of_a_frontend_is_shown_without_a_secret(url: str, shown: str) -> None:
    """Or nobody finds out which setting has it."""
    with pytest.raises(ConfigError) as caught:
        Frontend(url)
    assert (caught.value.value, "hunter2" in str(caught.value)) == (shown, False)
