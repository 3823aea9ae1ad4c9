"""``python -m vllm_treeflash.bench``: the same as ``vllm-treeflash bench``."""

from __future__ import annotations

import argparse

from vllm_treeflash.bench.cli import add_arguments, run

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m vllm_treeflash.bench")
    add_arguments(parser)
    raise SystemExit(run(parser.parse_args()))
