"""Files that others name: only a regular one is opened, so that a pipe or a device is refused and never waited for.

All of it is plain Python I/O, during which the other threads run, also while a disk hangs. Libraries that map a file
hold them up meanwhile; and the process ends (SIGBUS) if a mapped file gets shorter, or a page of it can't be read.
"""

import errno
import os
import stat
from io import BufferedReader, FileIO
from pathlib import Path

# Largest file that is read as a whole. Tokenizers are the largest, with some tens of MB.
MAX_WHOLE_BYTES = 100_000_000


def open_file(path: Path | str) -> FileIO:
    """Open a regular file for reading, without a buffer. Blocks as its disk does.

    Raises:
        OSError: it is missing, can't be opened, or is no regular file.
    """
    try:
        return FileIO(path, "rb", opener=_opened)
    except ValueError as exc:  # a NUL in it
        raise OSError(errno.EINVAL, "is no path", str(path)) from exc


def read_file(path: Path | str, limit_bytes: int = MAX_WHOLE_BYTES) -> bytes:
    """A whole file. Blocks as its disk does.

    Raises:
        OSError: as `open_file`; it can't be read, or has more than `limit_bytes`.
    """
    with BufferedReader(open_file(path)) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit_bytes:
            raise OSError(errno.EFBIG, f"has more than {limit_bytes} bytes", str(path))
        return file.read(size)


def why(exc: OSError) -> str:
    """What went wrong, in words, without the path."""
    return exc.strerror or type(exc).__name__


def _opened(path: str, flags: int) -> int:
    """Without waiting for somebody who writes into a pipe."""
    flags |= os.O_NOCTTY
    try:
        fd = os.open(path, flags | os.O_NONBLOCK)
    except BlockingIOError:
        # Somebody holds a lease on it (a file server on this machine), and is asked for it. No pipe gives this error.
        fd = os.open(path, flags)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "is no regular file", path)
        os.set_blocking(fd, True)
    except BaseException:
        os.close(fd)
        raise
    return fd
