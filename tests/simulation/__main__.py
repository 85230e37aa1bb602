"""`python -m tests.simulation`: many seeds, or one again with its trace.

python -m tests.simulation --seeds 10000          # as `make simulate`; the last line is JSON
python -m tests.simulation --seed 4711 -v         # replays one exactly, and shows its trace
python -m tests.simulation --seed 3 --bug verify-nothing
"""

import argparse
import json
import sys
import time
from collections import Counter

from tests.simulation.bugs import BUGS
from tests.simulation.running import MAX_BUG_SEEDS, Run, find_bugs, simulate, simulate_many
from tests.simulation.truth import TAIL_LEN

# Lines of trace that are shown for a seed that fails.
NUM_TAIL_LINES = 40
# Failing seeds whose trace is shown, of the others only the number; and violations that are shown of each.
NUM_SHOWN = 5
SHOWN_CHARS = 240


def main() -> int:
    """0: every invariant held, and every planted bug was caught."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=200, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first one")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--no-planted", action="store_true", help="don't check that planted bugs are caught")
    parser.add_argument("--seed", type=int, help="only this one")
    parser.add_argument("--bug", choices=sorted(BUGS), help="with --seed: plant this bug")
    parser.add_argument("-v", action="store_true", help="with --seed: show the whole trace")
    parser.add_argument("--digest", action="store_true", help="print seed and digest of each run")
    args = parser.parse_args()
    if args.seed is not None:
        run = simulate(args.seed, args.bug, tail_len=None if args.v else TAIL_LEN)
        _show(run, None if args.v else NUM_TAIL_LINES)
        print(f"seed {run.seed}: digest {run.digest}, {run.num_messages} messages, {run.num_tokens} tokens")
        return 0 if run.is_ok else 1
    return _many(args)


def _many(args: argparse.Namespace) -> int:
    began = time.monotonic()
    failed: list[int] = []
    counts: Counter[str] = Counter()
    for number, run in enumerate(simulate_many(range(args.first, args.first + args.seeds), args.processes), 1):
        if args.digest:
            print(run.seed, run.digest)
        counts += run.counts
        if not run.is_ok:
            failed.append(run.seed)
            if len(failed) <= NUM_SHOWN:
                _show(run, NUM_TAIL_LINES)
            print(f"seed {run.seed} FAILED; replay: python -m tests.simulation --seed {run.seed} -v", flush=True)
        if number % 500 == 0:
            print(
                f"{number} seeds, {len(failed)} failed, {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True
            )
    planted: dict[str, int | None] = {}
    if not args.no_planted:
        planted = find_bugs(MAX_BUG_SEEDS, args.processes)
    summary = {
        "seeds": args.seeds,
        "violations": len(failed),
        "seconds": round(time.monotonic() - began, 1),
        "failed": failed[:100],
        "faults": _named(counts, "fault "),
        "ops": _named(counts, "op "),
        "leaders": counts["leaders"],
        "recovered": _named(counts, "recovered "),
        "planted": {name: {"invariant": BUGS[name].invariant, "seed": seed} for name, seed in planted.items()},
    }
    print(json.dumps(summary))
    return 1 if failed or None in planted.values() else 0


def _named(counts: Counter[str], prefix: str) -> dict[str, int]:
    return {name.removeprefix(prefix): n for name, n in sorted(counts.items()) if name.startswith(prefix)}


def _show(run: Run, num_lines: int | None) -> None:
    lines = run.tail if num_lines is None or run.is_ok else _around_first(run, num_lines)
    if num_lines is None or not run.is_ok:
        for at_s, kind, what in lines:
            print(f"{at_s:9.3f}  {kind:32}  {what if num_lines is None else what[:SHOWN_CHARS]}")
    for violation in run.violations if num_lines is None else run.violations[:NUM_SHOWN]:
        print(f"seed {run.seed}: {violation}")


def _around_first(run: Run, num_lines: int) -> tuple[tuple[float, str, str], ...]:
    """What led to the first violation."""
    for number, (_, kind, _) in enumerate(run.tail):
        if kind == "VIOLATION":
            return run.tail[max(0, number - num_lines) : number + 1]
    return run.tail[-num_lines:]


if __name__ == "__main__":
    sys.exit(main())
