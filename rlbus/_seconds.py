"""Durations that HTTP callers send as text, read as strictly as their JSON: Python's `float` takes much that nobody
means by a number of seconds (`1_0`, `nan`, ` 5`), and some of it as another number than other readers would.
"""

import re

# Digits, and maybe a point with more digits.
_PLAIN = re.compile(r"[0-9]{1,32}(\.[0-9]{1,32})?")


def read_seconds(text: str, most_s: float) -> float | None:
    """The number that `text` is, as plain decimal digits; None unless it is above 0 and at most `most_s`."""
    if _PLAIN.fullmatch(text) is None:
        return None
    seconds = float(text)
    return seconds if 0 < seconds <= most_s else None
