"""Asks engines for greedy tokens over their own completions route, as any client would."""

from collections.abc import Sequence

import httpx

from rlbus.schemas import MemberView
from tests.chaos.messages import PROBE_PROMPT, PROBE_TOKENS

# One completion of a few tokens; a paused engine that nobody resumes answers nothing.
ANSWER_S = 20.0


async def wrong_outputs(expected: Sequence[tuple[MemberView, tuple[int, ...]]]) -> tuple[str, ...]:
    """Those workers that don't answer with the tokens expected of them, or not at all. Cancel: leaves nothing."""
    wrong = []
    async with httpx.AsyncClient(timeout=ANSWER_S, trust_env=False) as client:
        for member, tokens in expected:
            body = {
                "model": member.descriptor.model,
                "prompt": list(PROBE_PROMPT),
                "max_tokens": PROBE_TOKENS,
                "temperature": 0.0,
                "ignore_eos": True,
                "return_token_ids": True,
            }
            try:
                answer = await client.post(f"{member.descriptor.completions_url}/v1/completions", json=body)
                answer.raise_for_status()
                theirs = tuple(answer.json()["choices"][0]["token_ids"])
            except (httpx.HTTPError, KeyError, ValueError) as exc:
                wrong.append(f"{member.worker} ({exc!r})")
                continue
            if not tokens or theirs[: len(tokens)] != tokens:
                wrong.append(str(member.worker))
    return tuple(wrong)
