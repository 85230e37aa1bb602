"""What happens to requests in flight when generation stops."""

import enum


class PauseMode(enum.StrEnum):
    """What a pause or a sleep does with requests in flight, in vLLM's words."""

    KEEP = "keep"  # frozen, and continued after resume
    WAIT = "wait"  # finished first, then paused
    ABORT = "abort"  # ended now, with the tokens that they have
