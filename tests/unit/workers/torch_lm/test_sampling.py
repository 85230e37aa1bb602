"""How tokens are chosen."""

import math

import pytest

pytest.importorskip("torch")

import torch

from rlbus.workers.torch_lm.sampling import Sampling, choose, new_generator

pytestmark = pytest.mark.unit

LOGITS = torch.tensor([math.log(p) for p in (0.1, 0.2, 0.3, 0.4)])


def draw(sampling: Sampling, num: int) -> list[int]:
    """Tokens of one request."""
    generator = new_generator(sampling)
    return [choose(LOGITS[None], [sampling], [generator])[0].token for _ in range(num)]


def test_greedy_takes_the_likeliest_and_needs_no_chance() -> None:
    """With its log probability, and those that were asked for."""
    sampling = Sampling(temperature=0, num_top=2)
    [chosen] = choose(LOGITS[None], [sampling], [new_generator(sampling)])
    assert chosen.token == 3
    assert chosen.logprob == pytest.approx(math.log(0.4))
    assert [token for token, _ in chosen.top] == [3, 2]
    assert chosen.top[1][1] == pytest.approx(math.log(0.3))


def test_shares_of_drawn_tokens_are_the_models() -> None:
    """At temperature 1; at a low one nearly greedy, at a high one nearly even."""
    tokens = draw(Sampling(seed=1), 4000)
    for token, share in enumerate((0.1, 0.2, 0.3, 0.4)):
        assert tokens.count(token) / 4000 == pytest.approx(share, abs=0.03)
    assert set(draw(Sampling(seed=1, temperature=0.01), 50)) == {3}
    even = draw(Sampling(seed=1, temperature=50), 4000)
    assert even.count(0) / 4000 == pytest.approx(0.25, abs=0.03)


def test_log_probability_is_the_models_own_whatever_the_temperature() -> None:
    """As vLLM gives it by default."""
    for sampling in (Sampling(seed=1, temperature=3.0), Sampling(seed=1, top_p=0.5)):
        [chosen] = choose(LOGITS[None], [sampling], [new_generator(sampling)])
        assert chosen.logprob == pytest.approx(float(LOGITS[chosen.token]))


def test_top_p_leaves_the_likeliest_only() -> None:
    """Those that make up the share, at least one."""
    assert set(draw(Sampling(seed=1, top_p=0.65), 200)) == {2, 3}
    assert set(draw(Sampling(seed=1, top_p=1e-6), 50)) == {3}


def test_a_seed_decides_whatever_else_is_in_the_batch() -> None:
    """Alone or beside others; without one it is drawn."""
    alone = draw(Sampling(seed=5), 20)
    seeded, other = Sampling(seed=5), Sampling(temperature=0.7)
    generators = [new_generator(other), new_generator(seeded)]
    beside = [choose(LOGITS.expand(2, 4), [other, seeded], generators)[1].token for _ in range(20)]
    assert beside == alone
    assert draw(Sampling(), 100) != draw(Sampling(), 100)
