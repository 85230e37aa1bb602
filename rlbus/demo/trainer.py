"""The trainer process of the demo: a plain training loop that never talks to an engine's control routes.

It samples rollouts over the engines' OpenAI routes, takes one optimiser step, and hands the new weights to
`trainer.update_weights`. After every update it decodes a probe greedily on each engine and on its own model.
Run as `python -m rlbus.demo.trainer`; it reports to the demo by JSON lines on stdout (`rlbus.demo.events`).
"""

import argparse
import sys
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import TypeVar

import msgspec
import torch

import rlbus
from rlbus.demo.events import NO_VERSION, Failed, Ready, StepDone, TrainerEvent, num_mixed
from rlbus.demo.policy import NEAR_TIE, Greedy, LanguageModel, Learner, Sample, TorchModel, TransformersModel, greedy
from rlbus.demo.rollouts import Endpoint, Rollouts
from rlbus.errors import BrokenError, PartialError, RLBusError
from rlbus.reports import UpdateReport
from rlbus.schemas import FleetView, OpStatus, Report, Version, WeightsData

NUM_PROMPTS = 8
SAMPLES_PER_PROMPT = 16
PROMPT_TOKENS = 8
COMPLETION_TOKENS = 16
PROBE_TOKENS = 24
# Adam at this rate takes the reward of the tiny model from 0.13 to above 0.95 in about 20 steps (8 x 16 x 16 tokens).
LEARNING_RATE = 1e-2
READY_S = 300.0
UPDATE_S = 60.0
# Before something is tried again.
RETRY_S = 0.5
# How long an engine that failed gets no rollouts: a dead one is known as such by then, and not admitted.
SHUN_S = 15.0
T = TypeVar("T")


def emit(event: TrainerEvent) -> None:
    """Write one event to the demo."""
    sys.stdout.buffer.write(msgspec.json.encode(event) + b"\n")
    sys.stdout.buffer.flush()


def make_prompts(vocab_size: int, seed: int) -> list[tuple[int, ...]]:
    """The fixed prompts of the run, random token ids; the first is also the probe's."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocab_size, (NUM_PROMPTS, PROMPT_TOKENS), generator=generator)
    return [tuple(row) for row in ids.tolist()]


def endpoints_of(view: FleetView) -> list[Endpoint]:
    """Where the admitted workers of a fleet serve completions: those that have the fleet's version."""
    return [
        Endpoint(m.worker, m.descriptor.completions_url, m.descriptor.model)
        for m in view.members
        if m.descriptor.completions_url is not None and m.admitted
    ]


def persist(work: Callable[[], T]) -> T:
    """Do it again for up to READY_S while something of the fleet is away: an engine, or the controller.

    Raises: RLBusError: the last one, when that time is over.
    """
    until_s = time.monotonic() + READY_S
    while True:
        try:
            return work()
        except RLBusError as exc:
            if time.monotonic() >= until_s:
                raise
            print(f"trying again: {exc}", file=sys.stderr, flush=True)
            time.sleep(RETRY_S)


def admitted(trainer: rlbus.Trainer) -> list[Endpoint]:
    """The engines that may be sent rollouts. Raises BrokenError: there is none."""
    endpoints = endpoints_of(trainer.status())
    if not endpoints:
        raise BrokenError("the fleet", "no engine is admitted")
    return endpoints


def first_version(held: Version | None) -> Version:
    """What this run's model is before its first step, for a fleet that holds this version: a run of its own, newer."""
    return Version(incarnation=0 if held is None else held.incarnation + 1)


def update(trainer: rlbus.Trainer, model: LanguageModel, version: Version) -> UpdateReport:
    """Give the fleet this version. Who is lost in it is caught up when it is back; the others have it.

    Raises: RLBusError: nobody has it.
    """
    report = trainer.update_weights(model.module, version=version, deadline_s=UPDATE_S, check=False)
    if report.report.status is not OpStatus.PARTIAL and trainer.status().version != report.version:
        report.raise_for_status()
    return report


class Sampler:
    """Rollouts by whoever is admitted. One that failed is left out for a while: it may be dead, and not known to be."""

    def __init__(self, trainer: rlbus.Trainer, rollouts: Rollouts) -> None:
        self._trainer = trainer
        self._rollouts = rollouts
        # Until when, by worker, in seconds of the monotonic clock.
        self._shunned: dict[str, float] = {}

    def sample(self, prompts: Sequence[tuple[int, ...]]) -> list[list[Sample]]:
        """One batch, a group per prompt. Raises BrokenError: an engine failed, or there is none; to be tried again."""
        endpoints = admitted(self._trainer)
        now_s = time.monotonic()
        fine = [e for e in endpoints if self._shunned.get(e.worker, 0.0) <= now_s]
        try:
            return self._rollouts.sample(fine or endpoints, prompts, SAMPLES_PER_PROMPT, COMPLETION_TOKENS)
        except BrokenError as exc:
            self._shunned[exc.what] = time.monotonic() + SHUN_S
            raise


class Probe:
    """Compares engines with the trainer's model by greedy decoding of one prompt."""

    def __init__(self, rollouts: Rollouts, model: LanguageModel, prompt: tuple[int, ...]) -> None:
        self._rollouts = rollouts
        self._model = model
        self._prompt = prompt

    def run(self, endpoints: Sequence[Endpoint]) -> tuple[int, int, float]:
        """(mismatches, near ties, largest log probability gap) over all endpoints."""
        own = greedy(self._model, self._prompt, PROBE_TOKENS)
        mismatches = near_ties = 0
        gap = 0.0
        for endpoint in endpoints:
            try:
                theirs = self._rollouts.greedy(endpoint, self._prompt, PROBE_TOKENS)
            except BrokenError as exc:
                print(f"not probed: {exc}", file=sys.stderr, flush=True)
                continue
            num_equal = _num_equal(own, theirs)
            gap = max([gap, *(abs(a - b) for a, b in zip(own.logprobs[:num_equal], theirs.logprobs, strict=False))])
            if num_equal < PROBE_TOKENS:
                if own.gaps[num_equal] < NEAR_TIE:
                    near_ties += 1
                else:
                    mismatches += 1
        return mismatches, near_ties, gap


def _num_equal(own: Greedy, theirs: Sample) -> int:
    """How many tokens agree before the first that doesn't."""
    for i, (a, b) in enumerate(zip(own.tokens, theirs.tokens, strict=True)):
        if a != b:
            return i
    return len(own.tokens)


def versions_of(report: Report, workers: Collection[str]) -> dict[str, str]:
    """The versions of these workers, by their own answers, as text; NO_VERSION where one has none."""
    found = {}
    for outcome in report.outcomes:
        if outcome.worker not in workers:
            continue
        weights = outcome.data.weights if isinstance(outcome.data, WeightsData) else None
        found[str(outcome.worker)] = str(weights.version) if weights and weights.version else NO_VERSION
    return found


def ask_versions(trainer: rlbus.Trainer, workers: Collection[str]) -> dict[str, str]:
    """Ask them. Who is lost at this moment has no version. Raises: as `Trainer.versions`, except PartialError."""
    try:
        return versions_of(trainer.versions(), workers)
    except PartialError as exc:
        return versions_of(exc.report, workers)


def train(args: argparse.Namespace) -> None:
    """The whole loop."""
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    model: LanguageModel = TransformersModel(args.model) if args.policy == "transformers" else TorchModel(args.model)
    learner = Learner(model, LEARNING_RATE)
    prompts = make_prompts(args.vocab_size, args.seed)
    # An engine that is killed and comes back gets the weights of the step from this process' memory.
    with rlbus.Trainer(args.url, namespace=args.namespace, snapshot="memory") as trainer:
        view = trainer.wait_ready(num_workers=args.workers, deadline_s=READY_S)
        start = first_version(view.version)
        if view.version is not None:
            # A fleet of an earlier run: its weights are those of another model, and unknown where an engine died since.
            persist(partial(update, trainer, model, start))
            view = trainer.status()
        endpoints = endpoints_of(view)
        emit(Ready(workers=tuple(e.worker for e in endpoints)))
        with Rollouts(2 * args.workers) as rollouts:
            probe = Probe(rollouts, model, prompts[0])
            sampler = Sampler(trainer, rollouts)
            for step in range(1, args.updates + 1):
                groups = persist(partial(sampler.sample, prompts))
                rewards = [s.reward for group in groups for s in group]
                learner.step(groups)
                report = persist(partial(update, trainer, model, Version(incarnation=start.incarnation, step=step)))
                endpoints = persist(partial(admitted, trainer))
                versions = persist(partial(ask_versions, trainer, [e.worker for e in endpoints]))
                mismatches, near_ties, gap = probe.run(endpoints)
                emit(
                    StepDone(
                        step=step,
                        reward=sum(rewards) / len(rewards),
                        versions=versions,
                        phases_s=report.phases_s,
                        update_s=report.took_s,
                        paused_s=report.paused_s,
                        mismatches=mismatches,
                        near_ties=near_ties,
                        mixed=num_mixed(versions, str(report.version)),
                        logprob_gap=gap,
                    )
                )


def main() -> int:
    """Entry of the process: 0 when every step was done, 1 with a `Failed` event otherwise."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", help="default: RLBUS_URL")
    parser.add_argument("--namespace", help="default: RLBUS_NAMESPACE")
    parser.add_argument("--model", required=True)
    parser.add_argument("--policy", choices=("transformers", "torch"), required=True)
    parser.add_argument("--vocab-size", type=int, required=True)
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--updates", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    try:
        train(args)
    except RLBusError as exc:
        emit(Failed(message=str(exc)))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
