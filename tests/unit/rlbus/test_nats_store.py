"""What a NATS server's log says of its store."""

from pathlib import Path

import pytest

from rlbus._nats_store import StoreLog, free_bytes, lost_store

pytestmark = pytest.mark.unit

AT = "[27253] 2026/11/30 15:48:44.132083"
NO_SPACE = "write /s/jetstream/$G/streams/KV_b/msgs/1.blk: no space left on device"


@pytest.mark.parametrize(
    ("line", "why"),
    [  # as nats-server 2.15.1 writes them; the last two from its source
        (f"{AT} [ERR] Filestore [KV_b] Critical write error: {NO_SPACE}", NO_SPACE),
        (f"{AT} [ERR] JetStream stream '$G > KV_b' critical write error: {NO_SPACE}", NO_SPACE),
        (f"{AT} [ERR] JetStream out of space, will be DISABLED", "JetStream out of space, will be DISABLED"),
        (f"{AT} [ERR] JetStream out of resources, will be DISABLED", "JetStream out of resources, will be DISABLED"),
        (f"{AT} [ERR] JetStream failed to store a msg on stream '$G > KV_b': {NO_SPACE}", None),
        (f"{AT} [INF] Starting JetStream", None),
        (f"{AT} [WRN] Filesystem I/O took 12 s", None),
        (f"{AT} [ERR] client said: JetStream stream 'x' critical write error: {NO_SPACE}", None),
        ("", None),
    ],
)
def test_a_store_is_lost_when_the_server_says_so_in_words(line: str, why: str | None) -> None:
    """And by nothing else: a write may fail once, and a slow server is only slow."""
    assert lost_store(f"{AT} [INF] Server is ready\n{line}\n".encode()) == why


def test_a_log_is_read_from_now_on_and_in_whole_lines(tmp_path: Path) -> None:
    """What was said before a restart is over; a line that is half there is read later."""
    path = tmp_path / "server.log"
    line = f"{AT} [ERR] Filestore [KV_b] Critical write error: {NO_SPACE}\n"
    path.write_text(line)
    log = StoreLog(path)
    assert log.problem() is None
    with path.open("a") as file:
        for part, why in ((line[:40], None), (line[40:], NO_SPACE), (f"{AT} [INF] fine\n", None)):
            file.write(part)
            file.flush()
            assert log.problem() == why
    path.unlink()
    assert log.problem() is None
    assert free_bytes(tmp_path) > 0
