"""The `rlbus` command on a real server, with a real controller and fake workers as processes."""

import contextlib
import itertools
import os
import signal
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from rlbus.schemas import OpStatus
from rlbus.server import EmbeddedServer
from rlbus.sync import LoopThread, Trainer
from rlbus.transfer.fake import FakePlane, FakeSource
from rlbus.workers.engines.fake import DEFAULT_TENSORS
from tests.integration.commands import (
    LATE,
    LIMIT_S,
    NAMESPACE,
    Done,
    Process,
    again_until,
    done_well,
    forgive_late_op,
    in_one_term,
    one_term,
    program,
    rlbus,
    running_op,
    until_all_run,
    until_listed,
)
from tests.tries import TooLateError, best_of

pytestmark = [pytest.mark.integration, pytest.mark.alone]

# What any command that ends with an error may take here, in seconds, on a machine that is busy with other things.
BOUND_S = 40.0


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A real server on loopback."""
    loop = LoopThread("test-server")
    server = EmbeddedServer()
    loop.call(server.__aenter__())
    yield server.url
    loop.call(server.__aexit__(None, None, None))
    loop.stop()


@pytest.fixture(scope="module")
def controller(url: str) -> Iterator[Process]:
    """A real controller."""
    process = program("controller", "--json", url=url)
    assert process.document()["namespace"] == NAMESPACE
    yield process
    process.kill()


@pytest.fixture(scope="module")
def fleet(url: str, controller: Process) -> Iterator[dict[str, Process]]:
    """Two fake workers of one component and one of another, by worker id; one process each, to be frozen."""
    processes = [
        program("worker", "fake", "--no-restart", "--json", "-c", component, "--instance-id", instance_id, url=url)
        for component, instance_id in (
            ("decode", "18446744073709551615"),
            ("decode", "9007199254740993"),
            ("prefill", "7"),
        )
    ]
    workers = {process.document()["worker"]: process for process in processes}
    until_listed(url, 3)
    yield workers
    for process in processes:
        process.kill()


@contextlib.contextmanager
def silent_port() -> Iterator[int]:
    """A port where nobody listens, and nobody else comes to."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        yield int(sock.getsockname()[1])


@contextlib.contextmanager
def frozen(worker: Process, url: str) -> Iterator[None]:
    """It stands still inside; afterwards everybody runs."""
    worker.popen.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        worker.popen.send_signal(signal.SIGCONT)
        until_all_run(url, 3)


def is_empty(done: Done) -> bool:
    """Whether a controller that has no worker answered, which is 4 for every command."""
    told = done.document
    problem = told.get("error", {}).get("code")
    if done.code == 5 or problem == "BrokenError":
        return False
    assert done.code == 4
    return bool(problem == "no_worker" or told["members"] == [])


def assert_one_clear_line(done: Done, *parts: str) -> None:
    """One line on stderr with these parts, no traceback, nothing on stdout, within the bound."""
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("rlbus: ")
    assert "Traceback" not in done.stderr
    for part in parts:
        assert part in done.stderr
    assert done.stdout == ""
    assert done.took_s < BOUND_S


def test_no_url_is_wrong_usage_and_says_what_to_set() -> None:
    """2, and the variable's name."""
    done = rlbus("status")
    assert done.code == 2
    assert_one_clear_line(done, "RLBUS_URL", "rlbus up")


@pytest.mark.parametrize("command", [["status"], ["pause"], ["controller"], ["worker", "fake"]])
def test_no_server_is_nothing_there(command: Sequence[str]) -> None:
    """4 within the bound, naming the address, for every kind of command."""
    with silent_port() as port:
        done = rlbus(*command, url=f"nats://127.0.0.1:{port}")
    assert done.code == 4
    assert f"127.0.0.1:{port}" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.took_s < BOUND_S


def test_wrong_credentials_are_nothing_there_and_never_shown(url: str) -> None:
    """4 with the server's answer in words; the token that was tried isn't in it."""
    done = rlbus("status", url=f"nats://wrong-secret@{url.rpartition('@')[2]}")
    assert done.code == 4
    assert_one_clear_line(done, "127.0.0.1")
    assert "wrong-secret" not in done.stderr


def test_no_controller_is_nothing_there_at_once(url: str) -> None:
    """4 in the time of a connection, with what to start."""
    done = rlbus("pause", url=url, namespace="nobody")
    assert done.code == 4
    assert_one_clear_line(done, "namespace nobody", "rlbus controller", "rlbus up")


def test_an_error_with_json_is_one_document(url: str) -> None:
    """The same error, for a script."""
    done = rlbus("versions", "--json", url=url, namespace="nobody")
    assert done.code == 4
    assert done.document["exit_code"] == 4
    assert done.document["error"]["code"] == "BrokenError"
    assert "no controller answers" in done.document["error"]["message"]


def test_no_worker_is_nothing_there_and_says_how_to_start_one(url: str) -> None:
    """A controller without workers: status shows it and ends with 4, and so does a verb."""
    lonely = program("controller", "--json", "--namespace", "lonely", url=url)
    try:
        assert lonely.document()["namespace"] == "lonely"

        def ask(*argv: str) -> Done:
            return rlbus(*argv, url=url, namespace="lonely")

        # Not if it loses its lease meanwhile: then nobody answers for a moment.
        again_until(lambda: "start one with `rlbus worker fake`" in ask("status").stdout)
        again_until(lambda: is_empty(ask("status", "--json")))
        again_until(lambda: is_empty(ask("pause", "--json")))
    finally:
        code, stderr = lonely.end(signal.SIGTERM)
    assert (code, "Traceback" in stderr) == (0, False)


@in_one_term(3)
def test_workers_and_status_list_the_fleet(url: str, fleet: dict[str, Process]) -> None:
    """Ids are whole in text and strings in JSON; the documents have their documented fields."""
    text = rlbus("workers", url=url)
    assert text.code == 0
    for worker in fleet:
        assert f"{worker} " in text.stdout
    document = rlbus("workers", "--json", url=url).document
    assert {w["worker"] for w in document["workers"]} == set(fleet)
    assert {w["descriptor"]["instance_id"] for w in document["workers"]} == {w.split("/")[1] for w in fleet}
    status = rlbus("status", "--json", url=url)
    assert status.code == 0
    assert {"namespace", "term", "version", "epoch", "op_id", "members"} <= set(status.document)


@in_one_term(3)
def test_pause_shows_by_whom_and_resume_ends_it(url: str, fleet: dict[str, Process]) -> None:
    """One component is paused and no other; status says so loudly; after resume nobody is."""
    pause = done_well(url, "pause", "--component", "decode")
    assert pause["status"] == "ok"
    assert sorted(o["worker"] for o in pause["outcomes"]) == sorted(w for w in fleet if "decode" in w)
    status = rlbus("status", url=url)
    loud = [line for line in status.stdout.splitlines() if line.startswith("!! ")]
    assert sorted(line.split()[1] for line in loud) == sorted(w for w in fleet if "decode" in w)
    assert all(" is PAUSED by " in line for line in loud)
    resume = rlbus("resume", url=url)
    assert resume.code == 0
    assert "resume: ok, 3 of 3 workers" in resume.stdout
    assert "!!" not in rlbus("status", url=url).stdout


@pytest.mark.parametrize(
    "verb", [["flush"], ["abort"], ["abort", "--request", "nobody"], ["versions", "--deadline", "60"]]
)
@in_one_term(3)
def test_the_other_verbs_report_one_outcome_per_worker(
    url: str, fleet: dict[str, Process], verb: Sequence[str]
) -> None:
    """0, and a report with every worker in it."""
    done = done_well(url, *verb)
    assert {o["worker"]: o["outcome"] for o in done["outcomes"]} == dict.fromkeys(fleet, "ok")


@in_one_term(3)
def test_the_fleet_sleeps_and_wakes_by_tags(url: str, fleet: dict[str, Process]) -> None:
    """All of it, a part, the rest; status says who sleeps, and a word that is no tag is wrong usage."""
    slept = done_well(url, "sleep")
    assert {o["data"]["type"] for o in slept["outcomes"]} == {"sleep"}
    try:
        status = rlbus("status", url=url).stdout
        assert status.count("is ASLEEP: kv_cache, weights") == 3
        assert status.count("asleep (kv_cache, weights)") == 3
        assert "PAUSED" not in status
        assert rlbus("resume", url=url).code == 3
        assert rlbus("wake", "--tags", "weights", url=url).code == 0
        assert rlbus("status", url=url).stdout.count("is ASLEEP: kv_cache;") == 3
    finally:
        woken = rlbus("wake", "--tags", "weights", "--tags", "kv_cache", url=url)
    assert (woken.code, "wake: ok, 3 of 3 workers" in woken.stdout) == (0, True)
    assert "ASLEEP" not in rlbus("status", url=url).stdout
    assert rlbus("sleep", "--tags", "kv", url=url).code == 2
    assert rlbus("sleep", "--level", "3", url=url).code == 2


@in_one_term(3)
def test_one_worker_can_be_addressed(url: str, fleet: dict[str, Process]) -> None:
    """`--worker` takes what `rlbus workers` shows."""
    done = done_well(url, "flush", "--worker", "prefill/7")
    assert [o["worker"] for o in done["outcomes"]] == ["prefill/7"]


@in_one_term(3)
def test_bad_targets_are_wrong_usage_or_nothing_there(url: str, fleet: dict[str, Process]) -> None:
    """What can't be a name is 2; a name that nobody has is 4 and is repeated."""
    assert rlbus("flush", "--worker", "prefill", url=url).code == 2
    assert rlbus("flush", "--component", "a b", url=url).code == 2
    assert rlbus("flush", "--component", "decode", "--worker", "prefill/7", url=url).code == 2
    unknown = rlbus("flush", "--worker", "prefill/8", url=url)
    assert unknown.code == 4
    assert_one_clear_line(unknown, "prefill/8")
    assert rlbus("flush", "--component", "encode", url=url).code == 4


def test_wrong_options_are_wrong_usage() -> None:
    """As every command line tool: 2."""
    assert rlbus("pause", "--mode", "stop").code == 2
    assert rlbus("nonsense").code == 2
    for deadline in ("1e400", "nan", "-1", "0"):
        done = rlbus("pause", "--deadline", deadline, url="nats://127.0.0.1:1")
        assert done.code == 2
        assert "use 0.1 to 86400 seconds (a day)" in done.stderr.splitlines()[-1]
    assert rlbus("update").code == 2
    assert rlbus("update", "--from", "/x", "--version", "seven", url="nats://127.0.0.1:1").code in (2, 4)
    assert rlbus().code == 2


@in_one_term(3)
def test_an_update_from_a_folder_that_workers_may_not_read_is_not_ok(url: str, fleet: dict[str, Process]) -> None:
    """The report says which worker refused and why; nobody stays paused."""
    done = rlbus("update", "--from", "/nowhere", "--json", url=url)
    assert done.code == 3
    assert done.stderr.startswith("rlbus: ")
    assert [(o["outcome"], o["phase"]) for o in done.document["outcomes"]] == [("refused", "check")] * len(fleet)
    assert "!!" not in rlbus("status", url=url).stdout


def test_an_update_of_a_trainer_shows_in_versions_and_status(url: str, fleet: dict[str, Process]) -> None:
    """A plain script's update over the real server reaches every worker; the commands say the same version."""
    steps = itertools.count(41)

    def play() -> None:
        step = next(steps)
        with Trainer(url, namespace=NAMESPACE, plane=FakePlane()) as trainer:
            trainer.wait_ready(num_workers=3, deadline_s=LIMIT_S)
            report = trainer.update_weights(FakeSource(DEFAULT_TENSORS), version=step, check=False).report
        forgive_late_op(report)
        with one_term(url):
            assert report.status is OpStatus.OK
            assert {o.worker for o in report.outcomes} == set(fleet)
            versions = rlbus("versions", "--json", "--deadline", "60", url=url).document
            found = {o["worker"]: o["data"]["weights"]["version"] for o in versions["outcomes"]}
            assert found == {w: [0, step] for w in fleet}
            shown = rlbus("status", url=url).stdout
            assert shown.startswith(f"namespace {NAMESPACE}, version 0.{step}, running op none")

    best_of(play)


def test_a_frozen_worker_costs_a_deadline_and_a_second_verb_is_busy(url: str, fleet: dict[str, Process]) -> None:
    """With one worker stopped a pause doesn't hang; meanwhile another verb is refused with 3, naming the op."""
    deadlines_s = iter((8, 24, 72, 72))

    def play() -> None:
        with one_term(url):
            with frozen(fleet["prefill/7"], url):
                pausing = program("pause", "--json", "--deadline", str(next(deadlines_s)), url=url)
                try:
                    running_op(url, pausing)
                    busy = rlbus("flush", "--json", url=url)
                    report = pausing.document()
                    assert pausing.popen.wait(LIMIT_S) == 1
                finally:
                    pausing.kill()
            if busy.document.get("error", {}).get("code") != "busy":
                raise TooLateError(f"the op was over by then: {busy.document}")
            assert busy.code == 3
            outcomes = {o["worker"]: o["outcome"] for o in report["outcomes"]}
            assert outcomes.pop("prefill/7") == "unknown"
            if "unknown" in outcomes.values():
                raise TooLateError("the others had no time to answer")
            assert set(outcomes.values()) == {"undone"}

    best_of(play)


def test_cancel_takes_back_what_runs_for_somebody_else(url: str, fleet: dict[str, Process]) -> None:
    """Its caller gets the report; with nothing that runs, it is refused with 3."""

    def play() -> None:
        with one_term(url):
            with frozen(fleet["prefill/7"], url):
                pausing = program("pause", "--json", "--deadline", "60", url=url)
                try:
                    op_id = running_op(url, pausing)
                    done = rlbus("cancel", "--json", "--deadline", "60", url=url)
                    report = pausing.document()
                finally:
                    pausing.kill()
            assert report["op_id"] == op_id
            (lost,) = (o for o in report["outcomes"] if o["worker"] == "prefill/7")
            if lost["fault"]["code"] in LATE:
                raise TooLateError(f"the op was given up before it was cancelled: {lost}")
            assert (done.code, done.document) == (0, {"op_id": op_id})
            assert report["status"] == "failed"
            assert lost["fault"]["code"] == "cancelled"

    best_of(play)
    again_until(lambda: rlbus("status", url=url).code == 0)
    nothing = rlbus("cancel", "--json", "--deadline", "60", url=url)
    assert (nothing.code, nothing.document["error"]["code"]) == (3, "unknown_op")


def test_ctrl_c_ends_a_watch_with_130(url: str, fleet: dict[str, Process]) -> None:
    """And without a traceback."""
    watching = program("status", "--watch", url=url)
    assert watching.popen.stdout is not None
    assert watching.popen.stdout.readline().startswith(f"namespace {NAMESPACE}")
    code, stderr = watching.end(signal.SIGINT)
    assert code == 130
    assert stderr == "rlbus: interrupted\n"


def children(pid: int) -> list[int]:
    """Process ids of the children of a process."""
    return [int(text) for text in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_up_starts_a_server_that_was_killed_again() -> None:
    """The controller comes back by itself, and so does a worker; stderr says it in one line."""
    process = program("up", "--json")
    try:
        url = process.document()["url"]
        worker = program("worker", "fake", "--json", url=url)
        try:
            worker.document()
            (server,) = children(process.popen.pid)
            os.kill(server, signal.SIGKILL)
            again_until(lambda: children(process.popen.pid) not in ([], [server]))
            again_until(lambda: rlbus("pause", url=url).code == 0)
        finally:
            worker.kill()
        code, stderr = process.end(signal.SIGINT)
        assert code == 0
        assert stderr.count("rlbus: nats-server ended with status -9; starting it again on port") == 1
    finally:
        process.kill()


def test_up_on_a_port_in_use_is_wrong_usage() -> None:
    """In one line."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = rlbus("up", "--port", str(taken.getsockname()[1]))
    assert done.code == 2
    assert_one_clear_line(done, "is in use on 127.0.0.1; choose another")


def test_up_gives_a_url_that_works_and_ends_with_0() -> None:
    """The document has the URL with its token; a controller answers there; Ctrl-C takes all of it down."""
    process = program("up", "--json")
    try:
        document = process.document()
        assert document["namespace"] == NAMESPACE
        again_until(lambda: is_empty(rlbus("status", "--json", url=document["url"])))
        code, stderr = process.end(signal.SIGINT)
        assert code == 0
        assert "Traceback" not in stderr
        assert rlbus("status", url=document["url"]).code == 4
    finally:
        process.kill()
