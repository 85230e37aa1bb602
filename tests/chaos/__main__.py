"""`python -m tests.chaos`: real faults on real processes, a table of what came of them, and totals as one JSON line.

python -m tests.chaos                              # as `make chaos`: all of them, torch first, then vLLM
python -m tests.chaos --engine torch
python -m tests.chaos --only 'worker-kill-*' --keep DIR
python -m tests.chaos --list
"""

import argparse
import asyncio
import json
import logging
import shutil
import sys
import time
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

from rlbus.errors import RLBusError
from tests.chaos.cases import CASES, Case
from tests.chaos.judge import judge
from tests.chaos.kits import KITS
from tests.chaos.running import run_case
from tests.chaos.stage import Stage
from tests.chaos.table import Row, header, line, totals

# One case with its preparation; the longest waits for an outage of 20 s and its end.
CASE_LIMIT_S = 240.0
# How often a case may be run again because it couldn't be run: the fleet could not be made whole before it, say.
MAX_RERUNS = 1


def main() -> int:
    """0: every case held."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--only", action="append", metavar="NAME", help="these, with * and ?; may be repeated")
    parser.add_argument("--engine", choices=sorted(KITS), help="only cases on this engine")
    parser.add_argument("--list", action="store_true", help="name the cases, and do nothing")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="of cases that break, keep trace and logs there")
    args = parser.parse_args()
    wanted = args.only or ["*"]
    cases = [c for c in CASES if args.engine in (None, c.engine) and any(fnmatch(c.name, name) for name in wanted)]
    if unknown := [name for name in wanted if not any(fnmatch(case.name, name) for case in CASES)]:
        parser.error(f"no such case: {', '.join(unknown)}")
    if args.list:
        print("\n".join(case.name for case in cases))
        return 0
    # The clients of the harness lose their controller and server on purpose.
    logging.getLogger("rlbus").setLevel(logging.CRITICAL)
    began_s = time.monotonic()
    print(header(), flush=True)
    rows = asyncio.run(run_cases(cases, args.keep))
    print(json.dumps(totals(rows, time.monotonic() - began_s)))
    return 1 if any(row.broken for row in rows) else 0


async def run_cases(cases: Sequence[Case], keep: Path | None = None) -> list[Row]:
    """All of them, on one stage for each engine; prints a line for each as it ends. `keep`: see `--keep`."""
    rows = []
    for engine, make in KITS.items():
        of_engine = [case for case in cases if case.engine == engine]
        if not of_engine:
            continue
        async with Stage(make()) as stage:
            for case in of_engine:
                row = await run_row(stage, case)
                print(line(row), flush=True)
                rows.append(row)
                if row.broken and keep is not None:
                    _keep(stage, keep / case.name)
    return rows


def _keep(stage: Stage, folder: Path) -> None:
    """The trace of the case, and the logs of all cases so far."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "trace.txt").write_text(stage.trace)
    for log in stage.folder.glob("*.log"):
        shutil.copy(log, folder)


async def run_row(stage: Stage, case: Case) -> Row:
    """One case, judged. If it can't be run, it is run again on a new stage, MAX_RERUNS times; the row says so."""
    reruns: list[str] = []
    while True:
        try:
            async with asyncio.timeout(CASE_LIMIT_S):
                seen = await run_case(stage, case)
            return Row(case, seen, judge(case, seen), tuple(reruns))
        except (RLBusError, TimeoutError) as exc:
            if len(reruns) >= MAX_RERUNS:
                return Row(case, None, (f"it couldn't be run: {exc!r}",), tuple(reruns))
            reruns.append(repr(exc))
            await stage.reset()


if __name__ == "__main__":
    sys.exit(main())
