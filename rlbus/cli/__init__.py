"""The `rlbus` command."""
