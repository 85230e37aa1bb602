"""How the tests are shared out among processes, where `make test` asks pytest-xdist for several.

Tests of one file stay together, since what they need is often started once per file. Two folders are cut otherwise: in
the contract suite it is an engine that is started once, for tests of all files, and a test of the simulation needs
nothing from another and takes long.
"""

import pytest


@pytest.hookimpl(tryfirst=True)  # xdist reads the groups in the same hook
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Called by pytest once it has found the tests; says which of them have to run in the same process."""
    if not config.getoption("loadgroup", default=False):  # xdist sets it in the processes that run tests
        return
    for item in items:
        group, _, test = item.nodeid.partition("::")
        if group.startswith("tests/simulation/"):
            continue
        if group.startswith("tests/engines/"):
            # `test_name[engine]` or `test_name[engine-more]`
            group = test.partition("[")[2].rstrip("]").partition("-")[0]
        item.add_marker(pytest.mark.xdist_group(group))
