"""Neither end of a transfer needs more memory than it promises, however large a tensor is."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

SCRIPT = Path(__file__).parent / "peak_memory.py"
BUCKET_BYTES = 8 * 1024 * 1024
TENSOR_BYTES = 256 * 1024 * 1024
# What Python and torch take when code of theirs runs for the first time.
SLACK_BYTES = 16 * 1024 * 1024


def extra_bytes(*arguments: str) -> int:
    out = subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, check=True)
    return int(out.stdout)


@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
def test_a_sender_needs_two_buckets_beyond_its_source(layout: str) -> None:
    """Also for a tensor of 32 buckets that has to be copied to be sent: a bucket at a time."""
    assert extra_bytes("send", layout) < 2 * BUCKET_BYTES + SLACK_BYTES


def test_a_receiver_needs_two_buckets_and_the_tensor_it_assembles() -> None:
    """When `load` keeps nothing."""
    assert extra_bytes("receive", "contiguous") < TENSOR_BYTES + 2 * BUCKET_BYTES + SLACK_BYTES
