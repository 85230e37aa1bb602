"""Op ids of the commands that make up one op: `<op_id>-t<term>-<step>`. Pure."""

import hashlib

# Source: rlbus.schemas.ids.TOKEN_PATTERN.
MAX_TOKEN_CHARS = 64
# Enough of a digest that two ops don't share it.
DIGEST_CHARS = 32

# The step that pauses, in updates and reloads; tells a pause of an op of ours from a person's hold.
PAUSE_STEP = "pause"


def derive(op_id: str, step: str) -> str:
    """The op id of one step. An id too long to carry the step is replaced by its digest, the same each time."""
    name = f"{op_id}-{step}"
    if len(name) <= MAX_TOKEN_CHARS:
        return name
    return f"{hashlib.sha256(op_id.encode()).hexdigest()[:DIGEST_CHARS]}-{step}"


def derive_step(op_id: str, term: int, step: str) -> str:
    """The op id of a command to workers. A controller that runs an op that one before it had begun is not answered with
    what became of that one's commands.
    """
    return derive(op_id, f"t{term}-{step}")


def is_pause_of_op(owner: str) -> bool:
    """Whether the owner of a pause is an update or reload (and not a person or program that asked for a pause)."""
    return owner.endswith(f"-{PAUSE_STEP}")
