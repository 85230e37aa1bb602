"""`python -m rlbus` is the same as the `rlbus` command."""

from rlbus.cli.app import main

if __name__ == "__main__":
    main()
