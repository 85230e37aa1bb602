"""Every subject, spelled out, and what may not become one."""

from collections.abc import Callable

import pytest

from rlbus import subjects
from rlbus._memory import matches
from rlbus.errors import ConfigError

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("built", "expected"),
    [
        (subjects.command("ns", "decode", "pause_generation"), "dyn.ns.decode.rl.pause_generation"),
        (subjects.command_to("ns", "decode", "pause_generation", "7"), "dyn.ns.decode.rl.pause_generation.7"),
        (subjects.commands_for("ns", "decode", "7"), ("dyn.ns.decode.rl.*", "dyn.ns.decode.rl.*.7")),
        (subjects.worker("ns", "decode", "7"), "dyn.ns.decode.worker.7"),
        (subjects.all_workers("ns"), "dyn.ns.*.worker.*"),
        (subjects.worker_event("ns", "decode", "7"), "dyn.ns.decode.event.7"),
        (subjects.all_worker_events("ns"), "dyn.ns.*.event.*"),
        (subjects.control("ns", "update_weights"), "dyn.ns.controller.update_weights"),
        (subjects.all_control("ns"), "dyn.ns.controller.*"),
        (subjects.controller_event("ns", "op_started"), "dyn.ns.controller.event.op_started"),
        (subjects.controller_events("ns"), "dyn.ns.controller.event.>"),
    ],
)
def test_subjects_are_those_of_the_design(built: object, expected: object) -> None:
    """DESIGN section 3, word for word."""
    assert built == expected


def test_subscriptions_match_what_they_are_for_and_nothing_else() -> None:
    """The controller doesn't hear its own events as requests, a worker not its neighbour's commands."""
    broadcast, own = subjects.commands_for("ns", "decode", "7")
    assert matches(broadcast, subjects.command("ns", "decode", "hello"))
    assert matches(own, subjects.command_to("ns", "decode", "hello", "7"))
    assert not matches(own, subjects.command_to("ns", "decode", "hello", "77"))
    assert not matches(broadcast, subjects.command_to("ns", "decode", "hello", "7"))
    assert not matches(broadcast, subjects.command("ns", "prefill", "hello"))
    assert matches(subjects.all_control("ns"), subjects.control("ns", "pause"))
    assert not matches(subjects.all_control("ns"), subjects.controller_event("ns", "op_started"))
    assert matches(subjects.controller_events("ns"), subjects.controller_event("ns", "op_started"))
    assert matches(subjects.all_workers("ns"), subjects.worker("ns", "decode", "7"))
    assert not matches(subjects.all_workers("ns"), subjects.worker("other", "decode", "7"))
    assert matches(subjects.all_worker_events("ns"), subjects.worker_event("ns", "decode", "7"))


@pytest.mark.parametrize("bad", ["", "a.b", "*", ">", "a b", "ü", "x" * 65, "a\n"])
@pytest.mark.parametrize(
    "build",
    [
        lambda t: subjects.command(t, "decode", "hello"),
        lambda t: subjects.command("ns", t, "hello"),
        lambda t: subjects.command("ns", "decode", t),
        lambda t: subjects.command_to("ns", "decode", "hello", t),
        lambda t: subjects.commands_for(t, "decode", "7"),
        lambda t: subjects.worker("ns", t, "7"),
        lambda t: subjects.worker_event("ns", "decode", t),
        lambda t: subjects.control("ns", t),
        lambda t: subjects.controller_event("ns", t),
        subjects.all_workers,
        subjects.all_control,
        subjects.controller_events,
    ],
)
def test_what_is_no_token_never_becomes_a_subject(build: Callable[[str], object], bad: str) -> None:
    """nats-py would publish it to nobody, or close for good (facts/nats.md A2)."""
    with pytest.raises(ConfigError) as caught:
        build(bad)
    assert caught.value.value == bad


@pytest.mark.parametrize("bad", ["-1", "07", "1e3", "18446744073709551616", "1.0"])
def test_an_instance_id_is_an_unsigned_64_bit_integer(bad: str) -> None:
    """In canonical decimal form."""
    with pytest.raises(ConfigError, match="64-bit"):
        subjects.worker("ns", "decode", bad)


def test_the_largest_instance_id_fits() -> None:
    """2**64 - 1, as text, unrounded."""
    assert subjects.worker("ns", "decode", "18446744073709551615") == "dyn.ns.decode.worker.18446744073709551615"


def test_a_component_may_not_be_called_controller() -> None:
    """Its subjects would be the controller's."""
    with pytest.raises(ConfigError, match="reserved"):
        subjects.command("ns", "controller", "hello")


def test_the_longest_subject_stays_within_the_limit() -> None:
    """So that no valid name can close a client for good."""
    longest = subjects.command_to("n" * 64, "c" * 64, "r" * 64, "18446744073709551615")
    assert len(longest) <= subjects.MAX_SUBJECT_CHARS


@pytest.mark.parametrize(
    ("subject", "expected"),
    [
        ("dyn.ns.decode.rl.hello", ("ns", "decode", "hello", None)),
        ("dyn.ns.decode.rl.hello.7", ("ns", "decode", "hello", "7")),
        ("dyn.ns.decode.rl.hello.07", None),
        ("dyn.ns.decode.rl.hello.7.8", None),
        ("dyn.ns.decode.rl", None),
        ("dyn.ns.decode.worker.7", None),
        ("dyn.ns.controller.rl.hello", None),
        ("dyn.ns.de code.rl.hello", None),
        ("dyn.ns..rl.hello", None),
        ("other.ns.decode.rl.hello", None),
        ("", None),
    ],
)
def test_command_subjects_are_parsed_back(subject: str, expected: tuple[str, ...] | None) -> None:
    """Anything else is None, never an exception."""
    assert subjects.parse_command(subject) == expected
