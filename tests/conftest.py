"""What every test may rely on, wherever it is run from."""

import signal

import pytest

# A shell starts what it runs in the background with Ctrl-C ignored, and every process below inherits that: there a test
# that interrupts itself, or a program that it started, would wait in vain. The default is what a terminal gives.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)  # before xdist looks for the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A file is one group, all of whose tests one process runs, unless the tests say otherwise: those of the contract
    suite are grouped by engine (`--dist loadgroup`).
    """
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.nodeid.partition("::")[0]))
