"""``vllm-treeflash``: demonstrate, measure and check TreeFlash on this machine."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from vllm_treeflash import __version__, demo, doctor


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status.

    Args:
        argv: arguments after the program's name; default ``sys.argv[1:]``.
    """
    arguments = sys.argv[1:] if argv is None else list(argv)
    args = _parser(arguments).parse_args(arguments)
    run = args.run
    try:
        return int(run(args))
    except KeyboardInterrupt:
        return 130


def _parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="vllm-treeflash", description=__doc__)
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    command = commands.add_parser("demo", help="plain vLLM and TreeFlash on a few prompts")
    demo.add_arguments(command)
    command.set_defaults(run=demo.run)

    command = commands.add_parser("doctor", help="find and repair what keeps vLLM from running")
    doctor.add_arguments(command)
    command.set_defaults(run=doctor.run)

    command = commands.add_parser("bench", help="compare decoding methods and budgets")
    if arguments[:1] == ["bench"]:
        # Only then: the benchmark imports what the demo can do without.
        from vllm_treeflash.bench import cli as bench

        bench.add_arguments(command)
        command.set_defaults(run=bench.run)
    return parser


if __name__ == "__main__":
    sys.exit(main())
