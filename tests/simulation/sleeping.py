"""Runs in which the operator also puts engines to sleep and wakes them: drawn beside the rest, which stays as it is."""

import random
from dataclasses import replace
from typing import Any

from tests.simulation.scenario import ACTIVE_S, Ask, Scenario

# Part of the callers that lose interest, as in `scenario`.
CANCEL_PART = 0.1


def with_sleeps(scenario: Scenario) -> Scenario:
    """The same run, with sleeps and wakes in it."""
    rng = random.Random(f"rlbus-simulation/sleep/{scenario.seed}")
    asks = list(scenario.asks)
    at_s = rng.uniform(0.5, 4.0)
    while at_s < ACTIVE_S:
        asks.append(_draw(rng, at_s))
        at_s += rng.choice((0.5, 2.0, 5.0)) * rng.uniform(0.5, 1.5)
    return replace(scenario, asks=tuple(sorted(asks, key=lambda ask: ask.at_s)))


def _draw(rng: random.Random, at_s: float) -> Ask:
    verb = rng.choice(("sleep", "wake", "wake"))
    options: dict[str, Any] = {
        "deadline_s": rng.choice((2.0, 6.0, 12.0)),
        "tags": rng.choice((None, ("weights",), ("kv_cache",))),
    }
    if verb == "sleep":
        options |= {"mode": rng.choice(("keep", "wait", "abort")), "level": rng.choice((1, 1, 1, 2))}
    return Ask(at_s, verb, options, rng.uniform(0.1, 5.0) if rng.random() < CANCEL_PART else None)
