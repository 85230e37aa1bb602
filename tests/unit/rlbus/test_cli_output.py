"""What the CLI writes and how it ends, without a fleet."""

import asyncio
import json
import signal
import subprocess
import sys

import msgspec
import pytest

from rlbus.__main__ import main
from rlbus.cli.interrupts import Interrupts
from rlbus.cli.options import target_of, version_of
from rlbus.cli.output import ExitCode, Output, age, aligned, exit_code_of_error, exit_code_of_report, progress_text
from rlbus.cli.views import lora_text, present, show_history, show_report, show_status, warnings_of
from rlbus.errors import BrokenError, ConfigError, DeadlineError, PartialError, TransferError, error_from_fault
from rlbus.schemas import (
    AbortedData,
    Descriptor,
    Fault,
    FaultCode,
    FleetView,
    Generation,
    HistoryItem,
    HistoryView,
    Liveness,
    LoraBehind,
    LoraResult,
    MemberView,
    OpProgress,
    OpStatus,
    Outcome,
    PausedData,
    PauseView,
    Report,
    ResultData,
    SleepData,
    SleepTag,
    Target,
    Version,
    WeightsState,
    WeightsView,
    WorkerId,
    WorkerOutcome,
    WorkerStatus,
)

pytestmark = pytest.mark.unit

BIG = "18446744073709551615"


def report_of(status: OpStatus, code: FaultCode | None = None) -> Report:
    """A report that ended so."""
    fault = None if code is None else Fault(code=code, message="because")
    return Report(op_id="o", op="pause", status=status, outcomes=(), phases_s={}, took_s=0.0, fault=fault)


def member(
    weights: WeightsView, *, pause: PauseView | None = None, liveness: Liveness = Liveness.ALIVE, age_s: float = 1.0
) -> MemberView:
    """A worker with these weights."""
    generation = Generation.RUNNING if pause is None else Generation.PAUSED
    return MemberView(
        worker=WorkerId(f"backend/{BIG}"),
        liveness=liveness,
        admitted=False,
        reason="paused",
        descriptor=Descriptor(
            namespace="n",
            component="backend",
            instance_id=BIG,
            engine="fake",
            model="m" * 90,
            world_size=2,
            routes=(),
        ),
        status=WorkerStatus(generation=generation, weights=weights, pause=pause),
        boot_id="b",
        age_s=age_s,
    )


def test_a_sleeper_is_loud_and_its_report_says_what_was_freed(capsys: pytest.CaptureFixture[str]) -> None:
    """Not as paused by nobody, which would be a fault; bytes in MiB."""
    asleep = msgspec.structs.replace(
        member(WeightsView(state=WeightsState.CLEAN)),
        status=WorkerStatus(
            generation=Generation.PAUSED,
            weights=WeightsView(state=WeightsState.CLEAN),
            asleep=(SleepTag.KV_CACHE,),
        ),
    )
    assert warnings_of(asleep, 0.0) == ["is ASLEEP: kv_cache; it generates nothing until `rlbus wake`"]
    data = SleepData(asleep=(SleepTag.KV_CACHE,), num_bytes=3 << 20)
    told = AbortedData(num_aborted=2, num_deferred=1, num_left=1)
    results: tuple[ResultData, ...] = (data, SleepData(asleep=()), told)
    outcomes = tuple(
        WorkerOutcome(worker=WorkerId(f"b/{n}"), outcome=Outcome.OK, phase="p", data=d) for n, d in enumerate(results)
    )
    show_report(Output(False), msgspec.structs.replace(report_of(OpStatus.OK), outcomes=outcomes))
    out = capsys.readouterr().out
    assert "asleep: kv_cache, 3.0 MiB" in out
    assert "asleep: nothing\n" in out
    assert "2 requests ended, 1 end at their first token, 1 left" in out


@pytest.mark.parametrize(
    ("status", "code", "ends"),
    [
        (OpStatus.OK, None, ExitCode.OK),
        (OpStatus.PARTIAL, FaultCode.ENGINE_FAILED, ExitCode.FAILED),
        (OpStatus.FAILED, FaultCode.ENGINE_FAILED, ExitCode.FAILED),
        (OpStatus.FAILED, FaultCode.DEADLINE, ExitCode.DEADLINE),
        (OpStatus.REFUSED, FaultCode.BUSY, ExitCode.REFUSED),
        (OpStatus.REFUSED, FaultCode.NO_WORKER, ExitCode.NOTHING_THERE),
        (OpStatus.REFUSED, None, ExitCode.REFUSED),
    ],
)
def test_a_report_ends_the_command_with_its_code(status: OpStatus, code: FaultCode | None, ends: ExitCode) -> None:
    """One row of the table; an error that carries the report ends the same way."""
    report = report_of(status, code)
    assert exit_code_of_report(report) is ends
    assert exit_code_of_error(PartialError(report)) is ends


@pytest.mark.parametrize(
    ("error", "ends"),
    [
        (ConfigError("url", "x", "no"), ExitCode.USAGE),
        (BrokenError("nats://h:1", "no server"), ExitCode.NOTHING_THERE),
        (DeadlineError("pause", 1.0), ExitCode.DEADLINE),
        (error_from_fault(Fault(code=FaultCode.BUSY, message="m")), ExitCode.REFUSED),
        (error_from_fault(Fault(code=FaultCode.NO_WORKER, message="m")), ExitCode.NOTHING_THERE),
        (error_from_fault(Fault(code=FaultCode.ENGINE_DEAD, message="m")), ExitCode.FAILED),
        (TransferError("join", "m"), ExitCode.FAILED),
        (KeyboardInterrupt(), ExitCode.INTERRUPTED),
        (asyncio.CancelledError(), ExitCode.INTERRUPTED),
        (ZeroDivisionError("oops"), ExitCode.FAILED),
    ],
)
def test_an_error_ends_the_command_with_its_code(error: BaseException, ends: ExitCode) -> None:
    """One row of the table."""
    assert exit_code_of_error(error) is ends


def test_an_error_is_one_line_on_stderr_and_a_document_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    """With --json the document has code, message and detail; line breaks in a message don't make a second line."""
    fault = Fault(code=FaultCode.BUSY, message="another\nop runs", detail={"op_id": "u1"})
    assert Output(True).error(error_from_fault(fault)) is ExitCode.REFUSED
    captured = capsys.readouterr()
    assert json.loads(captured.out) == {
        "error": {"code": "busy", "message": "another op runs [busy]", "detail": {"op_id": "u1"}},
        "exit_code": 3,
    }
    assert captured.err == "rlbus: another op runs [busy]\n"


def test_there_is_never_a_second_document(capsys: pytest.CaptureFixture[str]) -> None:
    """A service that is up and fails later says so on stderr only."""
    out = Output(True)
    out.document({"url": "x"})
    assert out.error(BrokenError("nats", "gone")) is ExitCode.NOTHING_THERE
    captured = capsys.readouterr()
    assert captured.out == '{"url": "x"}\n'
    assert captured.err == "rlbus: nats: gone\n"


def test_without_json_an_error_leaves_stdout_empty(capsys: pytest.CaptureFixture[str]) -> None:
    """And one that isn't ours is named as a bug."""
    Output(False).error(ZeroDivisionError("oops"))
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("rlbus: unexpected ZeroDivisionError: oops")
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-1, "0.0 s"), (0.44, "0.4 s"), (12, "12 s"), (300, "5 min"), (10_800, "3 h"), (259_200, "3 d")],
)
def test_ages_are_short(seconds: float, text: str) -> None:
    """A clock that is behind makes no negative age."""
    assert age(seconds) == text


def test_columns_are_as_wide_as_their_widest_cell() -> None:
    """Nothing is cut."""
    assert aligned([["A", "B"], ["long", "x"]]) == ["A     B", "long  x"]


@pytest.mark.parametrize(
    ("progress", "text"),
    [
        (OpProgress(op_id="o", phase="group"), "group"),
        (OpProgress(op_id="o", phase="pause", done=1, total=2), "pause 1/2 workers"),
        (OpProgress(op_id="o", phase="transfer", done=2**20, total=2**22, unit="bytes"), "transfer 1.0/4.0 MiB"),
        (OpProgress(op_id="o", phase="wait", done=3), "wait 3 workers"),
    ],
)
def test_progress_reads_as_text(progress: OpProgress, text: str) -> None:
    """Phase and share."""
    assert progress_text(progress) == text


def test_targets_are_parsed_and_bad_ones_refused() -> None:
    """Names that can't be one are told before anything is sent."""
    assert target_of(None, None) == Target()
    assert target_of(["decode"], []) == Target(components=("decode",))
    assert target_of([], [f"backend/{BIG}"]) == Target(workers=(WorkerId(f"backend/{BIG}"),))
    for components, workers in (
        (["a b"], None),
        (None, ["backend"]),
        (None, ["backend/007"]),
        (None, ["backend/18446744073709551616"]),
        (["a"], ["a/1"]),
    ):
        with pytest.raises(ConfigError):
            target_of(components, workers)


def test_versions_are_parsed_and_bad_ones_refused() -> None:
    """A step, or incarnation.step."""
    assert version_of(None) is None
    assert version_of("7") == Version(step=7)
    assert version_of("2.7") == Version(incarnation=2, step=7)
    for text in ("", "x", "1.x", "-1", "1.", "a.1", "1.2.3"):
        with pytest.raises(ConfigError):
            version_of(text)


def test_a_dirty_paused_silent_worker_is_told_loudly() -> None:
    """Who paused it, since when, what is torn and what helps, and how long it is silent."""
    pause = PauseView(owner="cli:me@host", mode="keep", since=1000.0)
    weights = WeightsView(state=WeightsState.DIRTY, last_good=Version(step=3))
    told = warnings_of(member(weights, pause=pause, liveness=Liveness.DEAD, age_s=40.0), now=1030.0)
    assert told == [
        "is DIRTY (last good: 0.3): its weights are torn, it stays paused until a full update or `rlbus update`",
        "is PAUSED by cli:me@host (keep) for 30 s, until it is resumed",
        "is DEAD: last heard of 40 s ago",
    ]
    assert warnings_of(member(WeightsView(state=WeightsState.CLEAN)), now=0.0) == []


@pytest.mark.parametrize(
    ("expires_at", "text"),
    [
        (None, "until it is resumed"),
        (1042.0, "its lease ends in 12 s if nobody renews it"),
        (1020.0, "its lease ended 10 s ago"),
    ],
)
def test_a_pause_says_how_long_it_holds(expires_at: float | None, text: str) -> None:
    """An explicit hold, a lease, and a lease that unclean weights have outlasted."""
    pause = PauseView(owner="u-pause", mode="keep", since=1000.0, expires_at=expires_at)
    (told,) = warnings_of(member(WeightsView(state=WeightsState.CLEAN), pause=pause), now=1030.0)
    assert told == f"is PAUSED by u-pause (keep) for 30 s, {text}"


def test_history_shows_who_did_what_and_what_was_taken_over(capsys: pytest.CaptureFixture[str]) -> None:
    """One line per op; one that runs has its phase instead of a status."""
    fault = Fault(code=FaultCode.CONTROLLER_LOST, message="its controller died")
    running = HistoryItem(
        op_id="o2",
        op="update_weights",
        caller="ann",
        term=4,
        began_at=100.0,
        phase="transfer",
        num_workers=2,
        version=Version(step=7),
    )
    ended = msgspec.structs.replace(
        running, op_id="o1", op="pause", status=OpStatus.FAILED, ended_at=101.5, fault=fault, settled_by=9
    )
    items = (running, ended)
    show_history(Output(False), HistoryView(namespace="n", term=9, items=items))
    _, first, second = capsys.readouterr().out.splitlines()
    assert all(text in first for text in ("update_weights", "o2", "ann", "in transfer", "0/2", "0.7"))
    assert all(text in second for text in ("failed", "1.50", "taken over by term 9", "its controller died"))
    show_history(Output(False), HistoryView(namespace="n", term=9, items=()))
    assert "nothing was done yet in namespace n" in capsys.readouterr().out
    outcomes = (WorkerOutcome(worker=WorkerId("backend/1"), outcome=Outcome.UNDONE, phase="pause"),)
    report = Report(op_id="o1", op="pause", status=OpStatus.FAILED, outcomes=outcomes, phases_s={}, took_s=1.5)
    show_history(Output(False), HistoryView(namespace="n", term=9, items=(ended,), report=report))
    assert "backend/1  UNDONE   pause" in capsys.readouterr().out


def test_an_update_that_nobody_ends_is_told_with_the_way_out() -> None:
    """Not while an op runs, which will end it."""
    left = member(WeightsView(state=WeightsState.UPDATING))
    (told,) = warnings_of(left, now=0.0)
    assert told == "has an update OPEN that nobody ends: the next full update or `rlbus update` heals it"
    assert warnings_of(left, now=0.0, is_op_running=True) == []


def test_status_shows_whole_instance_ids_and_warnings(capsys: pytest.CaptureFixture[str]) -> None:
    """Ids stay whole however narrow the terminal is; a dirty worker has a line of its own."""
    view = FleetView(
        namespace="n",
        term=4,
        version=Version(step=3),
        epoch=2,
        op_id=None,
        members=(member(WeightsView(state=WeightsState.DIRTY)),),
    )
    show_status(Output(False), view)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "namespace n, version 0.3, running op none, group 2, controller term 4"
    assert lines[1] == "1 worker, 0 admitted, 2 live ranks"
    assert lines[3].split()[0] == f"backend/{BIG}"
    assert "DIRTY" in lines[3]
    assert lines[4].startswith(f"!! backend/{BIG} is DIRTY")


def test_what_a_worker_lacks_and_what_it_has_alone_are_loud(capsys: pytest.CaptureFixture[str]) -> None:
    """And what an unload left behind stands in its line."""
    own = member(WeightsView(state=WeightsState.CLEAN))
    behind = (LoraBehind(id="policy@3", note="is given it next"),)
    own = msgspec.structs.replace(own, loras_behind=behind, loras_extra=("policy@2",))
    show_status(Output(False), FleetView(namespace="n", term=4, version=None, epoch=2, op_id=None, members=(own,)))
    lacks, has = capsys.readouterr().out.splitlines()[-2:]
    assert lacks == f"!! backend/{BIG} LACKS adapter policy@3: is given it next"
    assert has == f"!! backend/{BIG} HAS adapter policy@2, which the fleet doesn't have there: unload it"
    result = LoraResult(ids=("policy@1",), partly=("policy@2",), num_draining=1)
    assert lora_text(result) == "adapter policy@1; not let go everywhere: policy@2; still with requests on 1 worker"


def test_an_empty_fleet_says_how_to_start_a_worker(capsys: pytest.CaptureFixture[str]) -> None:
    """Not an empty table."""
    show_status(Output(False), FleetView(namespace="n", term=1, version=None, epoch=None, op_id=None, members=()))
    assert "no workers in namespace n; start one with `rlbus worker fake`" in capsys.readouterr().out


def test_workers_that_left_are_shown_but_do_not_count(capsys: pytest.CaptureFixture[str]) -> None:
    """A fleet whose workers are all gone is as empty as one that never had any."""
    gone = member(WeightsView(state=WeightsState.CLEAN), liveness=Liveness.LEFT)
    view = FleetView(namespace="n", term=1, version=None, epoch=None, op_id=None, members=(gone,))
    assert present(view) == []
    show_status(Output(False), view)
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("no workers in namespace n; start one")
    assert lines[3].split()[4] == "left"


def test_a_report_has_one_line_per_worker(capsys: pytest.CaptureFixture[str]) -> None:
    """Outcome, phase and reason of each; phases and pause of a longer op."""
    fault = Fault(code=FaultCode.ENGINE_FAILED, message="boom")
    outcomes = (
        WorkerOutcome(
            worker=WorkerId("a/1"),
            outcome=Outcome.OK,
            phase="pause",
            data=PausedData(num_aborted=0, num_held=3),
            took_s=0.1,
        ),
        WorkerOutcome(worker=WorkerId("a/2"), outcome=Outcome.FAILED, phase="pause", fault=fault),
    )
    report = Report(
        op_id="o",
        op="pause",
        status=OpStatus.PARTIAL,
        outcomes=outcomes,
        phases_s={"pause": 0.5, "resume": 0.25},
        took_s=0.75,
        paused_s=0.6,
    )
    show_report(Output(False), report)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "pause: partial, 1 of 2 workers, 0.75 s"
    assert lines[2].split() == ["a/1", "ok", "pause", "0.10", "0", "ended,", "3", "held"]
    assert lines[3].split() == ["a/2", "FAILED", "pause", "0.00", "boom", "[engine_failed]"]
    assert lines[4] == "seconds: pause 0.50  resume 0.25  (engines stood still for 0.60)"


def test_a_reader_that_has_enough_is_no_error_to_report() -> None:
    """`rlbus status | head -1`: no word on stderr, neither ours nor the interpreter's."""
    code = (
        "from rlbus.cli.output import Output\n"
        "out = Output(False)\n"
        "try:\n"
        "    for _ in range(1000):\n"
        "        out.line('x' * 1000)\n"
        "except BrokenPipeError as exc:\n"
        "    raise SystemExit(int(out.error(exc)))\n"
    )
    program = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert program.stdout is not None
    program.stdout.close()
    assert program.stderr is not None
    with program.stderr as said:
        assert (said.read(), program.wait(30.0)) == (b"", int(ExitCode.FAILED))


def test_help_that_cannot_be_written_is_a_failure_in_one_line() -> None:
    """Not a traceback."""
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "rlbus", "--help"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (int(ExitCode.FAILED), "rlbus: stdout: No space left on device\n")


# Sends itself Ctrl-C when a module is about to be loaded, and when all is done.
INTERRUPTED = """
import atexit, os, runpy, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)

class Finder:
    def find_spec(self, name, *_):
        if name == WHEN:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Finder())
if WHEN == "the end":
    atexit.register(os.kill, os.getpid(), signal.SIGINT)
sys.argv[1:] = ["--help"]
runpy.run_module("rlbus", run_name="__main__")
"""


@pytest.mark.parametrize(("when", "code"), [("rlbus.cli.app", 130), ("rlbus.errors", 130), ("the end", 0)])
def test_ctrl_c_while_it_is_loaded_or_ends_is_quiet(when: str, code: int) -> None:
    """Before there is anything to take back it ends with 130, and afterwards as it had ended."""
    program = INTERRUPTED.replace("WHEN", repr(when))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (code, "")


@pytest.mark.parametrize(("status", "code", "text"), [("no model", 1, "no model\n"), (None, 0, ""), (3, 3, "")])
def test_an_exit_of_a_library_is_one_of_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], status: object, code: int, text: str
) -> None:
    """A text is a failure that says why, as in any program of Python's."""

    def leave() -> None:
        raise SystemExit(status)

    monkeypatch.setattr("rlbus.cli.app.main", leave)
    monkeypatch.setattr("rlbus.__main__.interrupts", Interrupts())
    handler = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(SystemExit) as caught:
            main()
    finally:
        signal.signal(signal.SIGINT, handler)
    assert (caught.value.code, capsys.readouterr().err) == (code, text)


def test_a_pause_that_everybody_refused_is_not_told_as_a_standstill(capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing was changed on anybody."""
    fault = Fault(code=FaultCode.ASLEEP, message="sleeps")
    refused = WorkerOutcome(worker=WorkerId("a/1"), outcome=Outcome.REFUSED, phase="pause", fault=fault)
    phases = {"pause": 0.01, "resume": 0.0}
    report = msgspec.structs.replace(report_of(OpStatus.FAILED), outcomes=(refused,), phases_s=phases, paused_s=0.01)
    show_report(Output(False), report)
    assert "stood still" not in capsys.readouterr().out
