"""The `rlbus` command, and `python -m rlbus`: from the first line to the last, Ctrl-C ends it without a traceback."""

import os
import signal
import sys


def main() -> None:
    """Run the command. Ctrl-C counts for it from when it is loaded until it has ended; before, there is nothing to take
    back, and after, nothing changes its exit code.
    """
    # A shell lets what it starts in the background ignore Ctrl-C.
    is_ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_ours:
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    from rlbus.cli.app import main as run

    code = 130
    try:
        if is_ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)
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
    finally:
        if is_ours:
            signal.signal(signal.SIGINT, lambda *_: os._exit(code))
    sys.exit(code)


if __name__ == "__main__":
    main()
