"""The messages of vLLM's gRPC service `vllm.Control` that are used here, as classes made at run time.

Only the fields that are read or written: protobuf skips what it doesn't know. They live in a descriptor pool of their
own, since a program that has vLLM's or Dynamo's generated ones would refuse a second `vllm.ServerInfo`.

Source: vLLM 0.32, rust/proto/control.proto (names, numbers and types of the fields).
"""

from dataclasses import dataclass
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

PACKAGE = "vllm"
SERVICE = "vllm.Control"

_Field = descriptor_pb2.FieldDescriptorProto
_TYPES = {
    "string": _Field.TYPE_STRING,
    "bytes": _Field.TYPE_BYTES,
    "bool": _Field.TYPE_BOOL,
    "uint32": _Field.TYPE_UINT32,
    "uint64": _Field.TYPE_UINT64,
    "int64": _Field.TYPE_INT64,
    # An enum is an int32 on the wire.
    "enum": _Field.TYPE_INT32,
}

# message -> "number type name" of its fields. "repeated" and "optional" are prefixes; a type that is none of protobuf's
# own is another message.
_MESSAGES: dict[str, tuple[str, ...]] = {
    "Empty": (),
    "ServerInfo": (
        "1 string engine_version",
        "3 string instance_id",
        "4 ParallelismInfo parallelism",
        "10 uint32 max_loras",
        "11 RlCapabilities rl_capabilities",
    ),
    "RlCapabilities": (
        "1 bool weight_transfer_enabled",
        "2 string weight_transfer_backend",
        "3 bool sleep_mode_enabled",
        "4 bool draft_weight_updates_enabled",
    ),
    "ParallelismInfo": ("3 uint32 data_parallel_size", "6 uint64 world_size", "7 uint32 data_parallel_size_local"),
    "ModelInfo": ("1 string model_id", "2 string served_model_name", "22 bool supports_lora"),
    "AbortRequest": ("1 repeated string request_ids",),
    "PauseGenerationRequest": ("1 enum mode", "2 optional bool clear_cache"),
    "SleepRequest": ("1 optional uint32 level", "2 enum mode"),
    "WakeUpRequest": ("1 repeated string tags",),
    "IsPausedResponse": ("1 bool paused",),
    "InitWeightTransferEngineRequest": ("1 bytes init_info_json",),
    "UpdateWeightsRequest": ("1 bytes update_info_json",),
    "UpdateWeightVersionRequest": ("1 string weight_version",),
    "GetWeightVersionResponse": ("1 string weight_version",),
}


@dataclass(frozen=True, slots=True)
class Method:
    """One RPC of the service: its name, and the names of its request and response in `_MESSAGES`."""

    name: str
    request: str = "Empty"
    response: str = "Empty"

    @property
    def path(self) -> str:
        """As gRPC addresses it."""
        return f"/{SERVICE}/{self.name}"


GET_SERVER_INFO = Method("GetServerInfo", response="ServerInfo")
GET_MODEL_INFO = Method("GetModelInfo", response="ModelInfo")
ABORT = Method("Abort", "AbortRequest")
PAUSE = Method("PauseGeneration", "PauseGenerationRequest")
RESUME = Method("ResumeGeneration")
IS_PAUSED = Method("IsPaused", response="IsPausedResponse")
SLEEP = Method("Sleep", "SleepRequest")
WAKE_UP = Method("WakeUp", "WakeUpRequest")
INIT_TRANSFER = Method("InitWeightTransferEngine", "InitWeightTransferEngineRequest")
START_UPDATE = Method("StartWeightUpdate")
START_DRAFT_UPDATE = Method("StartDraftWeightUpdate")
UPDATE_WEIGHTS = Method("UpdateWeights", "UpdateWeightsRequest")
FINISH_UPDATE = Method("FinishWeightUpdate")
SET_VERSION = Method("UpdateWeightVersion", "UpdateWeightVersionRequest")
GET_VERSION = Method("GetWeightVersion", response="GetWeightVersionResponse")
METHODS = (
    GET_SERVER_INFO,
    GET_MODEL_INFO,
    ABORT,
    PAUSE,
    RESUME,
    IS_PAUSED,
    SLEEP,
    WAKE_UP,
    INIT_TRANSFER,
    START_UPDATE,
    START_DRAFT_UPDATE,
    UPDATE_WEIGHTS,
    FINISH_UPDATE,
    SET_VERSION,
    GET_VERSION,
)


def _field(text: str) -> tuple[Any, bool]:
    """A field's descriptor, and whether it tells "not set" from its type's zero."""
    number, *labels, kind, name = text.split()
    field = _Field(name=name, number=int(number), label=_Field.LABEL_OPTIONAL)
    if "repeated" in labels:
        field.label = _Field.LABEL_REPEATED
    if kind in _TYPES:
        field.type = _TYPES[kind]
    else:
        field.type, field.type_name = _Field.TYPE_MESSAGE, f".{PACKAGE}.{kind}"
    return field, "optional" in labels


def _make() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="rlbus/vllm_control.proto", package=PACKAGE, syntax="proto3")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for text in fields:
            field, has_presence = _field(text)
            if has_presence:
                # How protoc spells proto3's `optional`: a oneof of its own.
                field.proto3_optional, field.oneof_index = True, len(message.oneof_decl)
                message.oneof_decl.add(name=f"_{field.name}")
            message.field.append(field)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{PACKAGE}.{name}")) for name in _MESSAGES
    }


_CLASSES = _make()


def message(name: str, **fields: Any) -> Any:
    """A message of that name with these fields. Raises: KeyError: there is none; ValueError: it has no such field."""
    return _CLASSES[name](**fields)


def parse(name: str, data: bytes) -> Any:
    """A message from its bytes.

    Raises:
        google.protobuf.message.DecodeError: they aren't one.
    """
    return _CLASSES[name].FromString(data)
