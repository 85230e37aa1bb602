"""The wire, byte for byte: one example of every message, compared with the bytes in golden.json.

A change of golden.json is a change of the wire contract: a field may be added with a default, nothing else may change
without a new schema version. Rewrite the file with `python tests/wire/test_golden.py` and read the difference.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rlbus import schemas as s
from rlbus.codec import decode, encode
from rlbus.errors import DecodeError

pytestmark = pytest.mark.unit

GOLDEN = Path(__file__).with_name("golden.json")

V1 = s.Version(incarnation=1, step=41)
V2 = s.Version(incarnation=1, step=42)
SPECS = (
    s.TensorSpec(name="embed.weight", dtype="float32", shape=(512, 64)),
    s.TensorSpec(name="norm.weight", dtype="bfloat16", shape=(64,)),
)
SUMS = (s.TensorSum(name="embed.weight", checksum="00ff00ff00ff00ff"),)
PAGE = s.ManifestPage(digest="d1", page=1, num_pages=2, tensors=SPECS)
RENDEZVOUS = s.Rendezvous(host="127.0.0.1", port=29500, prefix="g1")
PLAN = s.GroupPlan(
    epoch=3,
    group_id="g1",
    backend="gloo",
    num_trainer_ranks=1,
    world_size=3,
    spans=(s.RankSpan(component="backend", instance_id="18446744073709551615", first=1, num_ranks=2),),
    rendezvous=RENDEZVOUS,
    bucket_bytes=1048576,
    timeout_s=30.0,
)
FAULT = s.Fault(code=s.FaultCode.BUSY, message="op-9 runs", retryable=True, detail={"op_id": "op-9"})
WEIGHTS = s.WeightsView(state=s.WeightsState.DIRTY, version=V2, last_good=V1, checksum="00ff00ff00ff00ff")
DESCRIPTOR = s.Descriptor(
    namespace="prod",
    component="backend",
    instance_id="7",
    engine="vllm",
    model="qwen",
    world_size=2,
    routes=("get_status", "pause_generation"),
    backends=("gloo",),
    system_url="http://127.0.0.1:9000",
    completions_url="http://127.0.0.1:8000",
    schema_version=2,
)
STATUS = s.WorkerStatus(
    generation=s.Generation.PAUSED,
    weights=WEIGHTS,
    pause=s.PauseView(owner="op-1", mode="keep", since=1700000000.5, expires_at=1700000030.5),
    drift="commanded running, observed paused",
    op_id="op-1",
    epoch=3,
    term=4,
    num_refused_messages=5,
    work=s.WorkView(route="update_weights_from_distributed", since=1700000000.5, lease_s=30.0),
    asleep=(s.SleepTag.KV_CACHE, s.SleepTag.WEIGHTS),
    loras=s.LorasView(
        ids=("policy@7",), capacity=4, num_draining=1, can_drain=False, can_hot_swap=True, sums=("0f" * 8,)
    ),
    draft=WEIGHTS,
)
SHA = "0f" * 32
OBJECT = s.ObjectSource(bucket="rlbus_loras", key="a7" * 32, sha256="f0" * 32, num_bytes=4096)
TARGET = s.Target(components=("backend",), workers=(s.worker_id("backend", "7"),))
WHO: dict[str, Any] = {"op_id": "op-1", "component": "backend", "instance_id": "7", "boot_id": "boot-1"}
ASKED: dict[str, Any] = {"op_id": "op-1", "deadline_s": 12.5, "caller": "trainer-0"}
FLEET_LORA = s.FleetLora(
    name="policy",
    revision=7,
    checksum=SHA,
    source=OBJECT,
    since=1.5,
    op_id="op-7",
    target=TARGET,
    not_on=("backend/8",),
    also_on=(s.WorkerId("decode/1"),),
)
EVENT: dict[str, Any] = {"component": "backend", "instance_id": "7", "at": 1700000000.5, "op_id": "op-1"}

OFFER = s.SnapshotOffer(kind=s.SnapshotKind.MEMORY, inbox="_INBOX.a.1", path="/snapshots/1.41")
SNAPSHOT = s.FleetSnapshot(version=V1, offer=OFFER, backend="gloo", pause_mode=s.PauseMode.ABORT, sums_digest="d2")

BODIES: tuple[s.CommandBody, ...] = (
    s.Hello(),
    s.GetStatus(),
    s.GetOutcome(of_op_id="op-0"),
    s.PauseGeneration(mode=s.PauseMode.ABORT, clear_cache=False, owner="ann", lease_s=30.0),
    s.RenewLease(owner="ann", lease_s=30.0),
    s.ResumeGeneration(force=True),
    s.FlushCache(),
    s.AbortRequest(request_ids=("r1", "r2")),
    s.PutManifest(page=PAGE),
    s.PrepareWeightsUpdate(version=V2, manifest_digest="d1", base_version=V1, allow_rollback=True),
    s.PrepareDraftUpdate(version=V2, manifest_digest="d1", base_version=V1, allow_rollback=True),
    s.InitGroup(plan=PLAN),
    s.DestroyGroup(epoch=3),
    s.ReceiveWeights(
        update_op_id="up-1", epoch=3, version=V2, manifest_digest="d1", bucket_bytes=1048576, is_draft=True
    ),
    s.CommitWeights(update_op_id="up-1", version=V2),
    s.AbortWeights(update_op_id="up-1", reason="sender gave up"),
    s.PrepareReload(path="/models/step-42", version=V2, allow_rollback=True, sums_digest="d2"),
    s.LoadWeights(path="/models/step-42", version=V2, allow_rollback=True, is_named=False),
    s.GetVersion(),
    s.SetVersion(version=V2, allow_rollback=True),
    s.InitTransfer(info='{"rank_offset":1}'),
    s.ShutdownTransfer(),
    s.StartUpdate(),
    s.ApplyUpdate(info='{"names":["a"]}', update_op_id="op-0"),
    s.FinishUpdate(version=V2, update_op_id="op-0"),
    s.GetChecksums(is_draft=True),
    s.Sleep(tags=(s.SleepTag.WEIGHTS,), level=2, mode=s.PauseMode.KEEP),
    s.WakeUp(tags=(s.SleepTag.WEIGHTS,)),
    s.LoadLora(name="policy", revision=7, checksum=SHA, source=OBJECT, hot_swap=True, evict_idle=True),
    s.UnloadLora(name="policy", revision=6, drain_s=30.0),
    s.GetLoras(),
)
DATA: tuple[s.ResultData, ...] = (
    s.PausedData(num_aborted=2, num_held=3),
    s.AbortedData(num_aborted=2, num_deferred=1, num_left=3),
    s.JoinedData(epoch=3, ranks=(1, 2), world_size=3),
    s.ReceivedData(num_bytes=131200, num_tensors=2, sums=SUMS, receive_s=0.5, load_s=0.25),
    s.WeightsData(weights=WEIGHTS, draft=WEIGHTS),
    s.ChecksumsData(algorithm="rlbus-1", sums=SUMS),
    s.SleepData(asleep=(s.SleepTag.KV_CACHE,), num_bytes=131200, num_aborted=2),
    s.StatusData(descriptor=DESCRIPTOR, status=STATUS),
    s.OutcomeData(of_op_id="op-0", running=True, status=s.ResultStatus.FAILED, fault=FAULT),
    s.LorasData(
        loras=(s.LoraView(name="policy", state=s.LoraState.DRAINING, revision=7, checksum=SHA, num_in_flight=2),),
        capacity=4,
        hot_swap=True,
        evicted=("policy@5",),
        num_aborted=3,
        cause=FAULT,
    ),
)
REPORT = s.Report(
    op_id="op-1",
    op="update_weights",
    status=s.OpStatus.PARTIAL,
    outcomes=(
        s.WorkerOutcome(
            worker=s.worker_id("backend", "7"),
            outcome=s.Outcome.FAILED,
            phase="transfer",
            fault=FAULT,
            data=s.AbortedData(num_aborted=1),
            took_s=0.5,
        ),
    ),
    phases_s={"pause": 0.25, "transfer": 0.5},
    took_s=1.5,
    fault=FAULT,
    version=V2,
    epoch=3,
    num_bytes=131200,
    paused_s=0.75,
    num_attempts=2,
    epochs=(11, 12),
    lora=s.LoraResult(
        ids=("policy@7",), checksum=SHA, hot_swap=True, evicted=("policy@3",), num_draining=1, partly=("policy@6",)
    ),
)


def command(body: s.CommandBody) -> s.Command:
    return s.Command(op_id="op-1", term=4, expires_at=1700000000.5, body=body, members=("7", "18446744073709551615"))


def result(data: s.ResultData) -> s.Result:
    return s.Result(**WHO, status=s.ResultStatus.FAILED, fault=FAULT, data=data, took_s=0.5, seq=7)


# (what the receiver decodes it as, the example)
EXAMPLES: tuple[tuple[Any, s.Wire], ...] = (
    *((s.Command, command(body)) for body in BODIES),
    (s.WorkerAnswer, s.Accepted(**WHO)),
    (s.WorkerAnswer, s.Progress(**WHO, phase="load", done=5, total=10, unit="tensors")),
    *((s.WorkerAnswer, result(data)) for data in DATA),
    (
        s.WorkerMessage,
        s.Announcement(boot_id="boot-1", seq=9, interval_s=5.0, descriptor=DESCRIPTOR, status=STATUS),
    ),
    (
        s.RoutesAnswer,
        s.RoutesAnswer(
            status="error", routes=("flush_cache",), system_url="http://w:1", world_size=2, method="x", message="no"
        ),
    ),
    (s.WorkerMessage, s.Goodbye(boot_id="boot-1", component="backend", instance_id="7", reason="scaled down")),
    (s.ControlRequest, s.PauseFleet(**ASKED, target=TARGET, mode=s.PauseMode.WAIT, clear_cache=False, lease_s=60.0)),
    (s.ControlRequest, s.ResumeFleet(**ASKED, target=TARGET, force=True)),
    (s.ControlRequest, s.FlushFleet(**ASKED, target=TARGET)),
    (s.ControlRequest, s.AbortFleet(**ASKED, target=TARGET, request_ids=("r1",))),
    (
        s.ControlRequest,
        s.SleepFleet(**ASKED, target=TARGET, tags=(s.SleepTag.KV_CACHE,), level=2, mode=s.PauseMode.KEEP),
    ),
    (s.ControlRequest, s.WakeFleet(**ASKED, target=TARGET, tags=(s.SleepTag.KV_CACHE,))),
    (s.ControlRequest, s.GetVersions(**ASKED, target=TARGET)),
    (s.ControlRequest, s.GetFleet(**ASKED, limit=250, after=s.worker_id("backend", "7"))),
    (s.ControlRequest, s.WaitReady(**ASKED, world_size=16, num_workers=8, target=TARGET, limit=250)),
    (s.ControlRequest, s.PutManifestPage(**ASKED, page=PAGE)),
    (
        s.ControlRequest,
        s.UpdateWeights(
            **ASKED,
            version=V2,
            manifest_digest="d1",
            backend="gloo",
            rendezvous=RENDEZVOUS,
            sender_id="t1",
            num_trainer_ranks=2,
            bucket_bytes=1048576,
            target=TARGET,
            require=1,
            on_failure=s.OnFailure.RETRY,
            pause_mode=s.PauseMode.WAIT,
            reset_prefix_cache=False,
            allow_rollback=True,
            stall_s=7.5,
            snapshot=OFFER,
            is_catch_up=True,
            is_draft=True,
        ),
    ),
    (
        s.ControlRequest,
        s.ReloadFleet(
            **ASKED,
            path="/m",
            version=V2,
            target=TARGET,
            pause_mode=s.PauseMode.ABORT,
            allow_rollback=True,
            is_catch_up=True,
            sums_digest="d2",
        ),
    ),
    (
        s.ControlRequest,
        s.TransferFleet(
            **ASKED,
            step=s.TransferStep.INIT,
            info='{"rank_offset": 1}',
            version=V2,
            target=TARGET,
            pause_mode=s.PauseMode.WAIT,
        ),
    ),
    (s.ControlRequest, s.CancelOp(**ASKED, of_op_id="op-0")),
    (
        s.ControlRequest,
        s.SenderSignal(
            **ASKED, of_op_id="op-0", epoch=3, step=s.SenderStep.SENT, num_bytes=131200, sums=SUMS, fault=FAULT
        ),
    ),
    (s.ControlReply, s.OpAccepted(op_id="op-1")),
    (s.ControlReply, s.OpProgress(op_id="op-1", phase="pause", done=1, total=2, unit="bytes")),
    (s.ControlReply, s.JoinTask(op_id="op-1", plan=PLAN)),
    (s.ControlReply, s.SendTask(op_id="op-1", epoch=3, version=V2)),
    (s.ControlReply, s.LeaveTask(op_id="op-1", epoch=3, reason="a member died")),
    (s.ControlReply, s.OpResult(report=REPORT)),
    (s.ControlReply, s.Refusal(op_id="op-1", fault=FAULT)),
    (
        s.ControlReply,
        s.FleetView(
            namespace="prod",
            term=4,
            version=V2,
            epoch=3,
            op_id="op-1",
            members=(
                s.MemberView(
                    worker=s.worker_id("backend", "7"),
                    liveness=s.Liveness.SUSPECT,
                    admitted=False,
                    descriptor=DESCRIPTOR,
                    status=STATUS,
                    boot_id="boot-1",
                    age_s=12.5,
                    reason="suspect",
                    loras_behind=(s.LoraBehind(id="policy@7", note="is given it next"),),
                    loras_extra=("policy@6",),
                ),
            ),
            loras=(FLEET_LORA,),
            next=s.worker_id("backend", "7"),
        ),
    ),
    (s.WorkerEvent, s.GenerationPaused(**EVENT, mode="keep", owner="op-1", expires_at=1700000030.5)),
    (s.WorkerEvent, s.GenerationResumed(**EVENT, forced=True, lease_ended=True, owner="op-1")),
    (s.WorkerEvent, s.WeightsChanged(**EVENT, state=s.WeightsState.CLEAN, version=V2)),
    (s.WorkerEvent, s.DraftChanged(**EVENT, state=s.WeightsState.CLEAN, version=V2)),
    (s.WorkerEvent, s.SleepChanged(**EVENT, asleep=(s.SleepTag.KV_CACHE,))),
    (s.WorkerEvent, s.LoraLoaded(**EVENT, name="policy", revision=7, checksum=SHA, hot_swap=True)),
    (s.WorkerEvent, s.LoraDraining(**EVENT, name="policy", revision=6)),
    (s.WorkerEvent, s.LoraUnloaded(**EVENT, name="policy", revision=6, num_aborted=1)),
    (s.WorkerEvent, s.CommandRefused(**EVENT, fault=FAULT, route="pause_generation")),
    (s.ControllerEvent, s.WorkerJoined(at=1.5, component="backend", instance_id="7", boot_id="boot-1")),
    (s.ControllerEvent, s.WorkerLeft(at=1.5, component="backend", instance_id="7", reason="silent")),
    (s.ControllerEvent, s.OpStarted(at=1.5, op_id="op-1", op="pause", caller="ann")),
    (s.ControllerEvent, s.OpAdvanced(at=1.5, op_id="op-1", phase="pause", done=1, total=2, unit="bytes")),
    (s.ControllerEvent, s.OpEnded(at=1.5, op_id="op-1", op="pause", status="failed", took_s=0.5, fault=FAULT)),
)

HISTORY_ITEM = s.HistoryItem(
    op_id="op-1",
    op="update_weights",
    caller="ann",
    term=4,
    began_at=1.5,
    phase="commit",
    num_workers=2,
    ended_at=2.5,
    status=s.OpStatus.PARTIAL,
    num_ok=1,
    version=V2,
    epoch=3,
    fault=FAULT,
    settled_by=5,
    what="policy@7",
)
EXAMPLES += (
    (
        s.ControlRequest,
        s.LoadLoraFleet(
            **ASKED,
            name="policy",
            source=OBJECT,
            checksum=SHA,
            revision=7,
            target=TARGET,
            pause_mode=s.PauseMode.WAIT,
            hot_swap=True,
            evict_idle=True,
            is_catch_up=True,
            where_possible=True,
        ),
    ),
    (s.ControlRequest, s.UnloadLoraFleet(**ASKED, name="policy", revision=7, drain_s=60.0, target=TARGET)),
    (s.ControlRequest, s.ListLoras(**ASKED, target=TARGET)),
    (
        s.LoraMark,
        s.LoraMark(
            term=7, op_id="op-7", loras=(FLEET_LORA,), past=(s.PastRevision(name="policy", revision=6, checksum=SHA),)
        ),
    ),
    (s.ControlRequest, s.GetHistory(**ASKED, limit=5, of_op_id="op-3")),
    (s.ControlReply, s.HistoryView(namespace="prod", term=4, items=(HISTORY_ITEM,), report=REPORT)),
    (
        s.JournalEntry,
        s.JournalEntry(
            item=HISTORY_ITEM,
            request=s.FlushFleet(**ASKED, target=TARGET),
            members=(s.worker_id("backend", "7"),),
            fleet=V2,
            before=(s.MemberBefore(boot_id="b1", version=V1, asleep=(s.SleepTag.KV_CACHE,), has_lora=True),),
            held=(s.worker_id("backend", "7"),),
            verified=(s.worker_id("backend", "7"),),
            freeing=("policy@7",),
            report=REPORT,
        ),
    ),
    (s.CatchUpTask, s.CatchUpTask(op_id="op-1", version=V1, workers=(s.worker_id("backend", "7"),))),
    (s.FleetMark, s.FleetMark(term=4, version=V1, rolled_back_from=V2, snapshot=SNAPSHOT)),
    (s.Lease, s.Lease(holder="h1", name="host/7", since=1.5)),
    (s.TermMark, s.TermMark(term=4)),
    (s.LoraSource, s.FolderSource(path="/adapters/policy/7")),
)

# Structs that are never sent as themselves: what others extend.
BASES = {s.Wire, s.Body, s.Data, s.Answer, s.Request, s.WorkerEventBase, s.ControllerEventBase}


def name_of(message: s.Wire) -> str:
    """The key in golden.json: the type, and what it carries where that varies."""
    inner = message.body if isinstance(message, s.Command) else message.data if isinstance(message, s.Result) else None
    return type(message).__name__ if inner is None else f"{type(message).__name__}({type(inner).__name__})"


def structs_in(value: object) -> Iterator[s.Wire]:
    """The struct itself and every one inside it."""
    if isinstance(value, s.Wire):
        yield value
        for name in value.__struct_fields__:
            yield from structs_in(getattr(value, name))
    elif isinstance(value, tuple):
        for item in value:
            yield from structs_in(item)


def subclasses_of(cls: type[s.Wire]) -> Iterator[type[s.Wire]]:
    """Every struct below `cls` that the package defines."""
    for sub in cls.__subclasses__():
        yield from subclasses_of(sub)
        if sub.__module__.startswith("rlbus.schemas"):
            yield sub


def golden() -> dict[str, str]:
    """Name -> the bytes on the wire, as text."""
    loaded: dict[str, str] = json.loads(GOLDEN.read_text(encoding="utf-8"))
    return loaded


def with_unknown_fields(value: Any) -> Any:
    """The same JSON as a newer peer would send it: one more field in every object that is a struct."""
    if isinstance(value, list):
        return [with_unknown_fields(item) for item in value]
    if not isinstance(value, dict):
        return value
    # The two plain maps of the contract have no fixed fields, so nothing in them is unknown.
    newer = {k: v if k in ("detail", "phases_s") else with_unknown_fields(v) for k, v in value.items()}
    return {**newer, "field_of_a_newer_peer": {"x": [1]}}


PARAMETERS = [pytest.param(as_type, message, id=name_of(message)) for as_type, message in EXAMPLES]


@pytest.mark.parametrize(("as_type", "message"), PARAMETERS)
def test_the_bytes_on_the_wire_are_the_golden_ones(as_type: Any, message: s.Wire) -> None:
    """Encoding gives them, and decoding them gives the example back."""
    expected = golden()[name_of(message)].encode()
    assert encode(message) == expected
    assert decode(expected, as_type, "test") == message


@pytest.mark.parametrize(("as_type", "message"), PARAMETERS)
def test_fields_of_a_newer_peer_are_ignored(as_type: Any, message: s.Wire) -> None:
    """At every level of every message."""
    newer = json.dumps(with_unknown_fields(json.loads(encode(message)))).encode()
    assert b"field_of_a_newer_peer" in newer
    assert decode(newer, as_type, "test") == message


@pytest.mark.parametrize(("as_type", "message"), PARAMETERS)
def test_a_message_without_its_required_fields_is_refused(as_type: Any, message: s.Wire) -> None:
    """An empty object is no message of any kind."""
    with pytest.raises(DecodeError):
        decode(b"{}", as_type, "test")


def test_there_is_one_golden_per_example_and_no_other() -> None:
    """A message that was taken away leaves no dead bytes behind."""
    assert sorted(golden()) == sorted(name_of(message) for _, message in EXAMPLES)


def test_every_struct_that_travels_is_in_a_golden() -> None:
    """A new message without an example fails here."""
    shown = {type(found) for _, message in EXAMPLES for found in structs_in(message)}
    assert set(subclasses_of(s.Wire)) - BASES - shown == set()


def test_every_member_of_every_union_is_an_example() -> None:
    """The unions are what receivers decode; each alternative is shown as such."""
    tops = {type(message) for _, message in EXAMPLES}
    unions = (s.WorkerAnswer, s.WorkerMessage, s.ControlRequest, s.ControlReply, s.WorkerEvent, s.ControllerEvent)
    members = {member for union in unions for member in union.__args__}
    assert members <= tops
    assert set(s.CommandBody.__args__) == {type(body) for body in BODIES}
    assert set(s.ResultData.__args__) == {type(data) for data in DATA}


def test_the_examples_leave_no_field_at_its_default() -> None:
    """Otherwise the golden bytes would not show how that field is spelled when it is used."""
    used: dict[str, bool] = {}
    for _, message in EXAMPLES:
        for found in structs_in(message):
            for info in msgspec.structs.fields(found):
                key = f"{type(found).__name__}.{info.name}"
                has_default = info.default is not msgspec.NODEFAULT
                used[key] = used.get(key, False) or not has_default or getattr(found, info.name) != info.default
    assert [key for key, is_used in used.items() if not is_used] == []


def main() -> None:
    """Rewrite golden.json from the examples."""
    texts = {name_of(message): encode(message).decode() for _, message in EXAMPLES}
    GOLDEN.write_text(json.dumps(texts, indent=1, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
