"""The `rlbus` command, and `python -m rlbus`: from the first line to the last, Ctrl-C ends it without a traceback."""

import sys

from rlbus.cli.interrupts import INTERRUPTED, interrupts


def main() -> None:
    """Run the command. Ctrl-C counts for it from when it is loaded until its outcome is known; before, there is nothing
    to take back, and after, nothing changes its exit code.
    """
    interrupts.begin()
    from rlbus.cli.app import main as run

    code = INTERRUPTED
    try:
        run()
    except KeyboardInterrupt:
        pass
    except SystemExit as exc:
        if isinstance(exc.code, int):
            code = exc.code
        else:  # as Python has it
            code = 0 if exc.code is None else 1
            if exc.code is not None:
                print(exc.code, file=sys.stderr)
    sys.exit(interrupts.settle(code))


if __name__ == "__main__":
    main()
