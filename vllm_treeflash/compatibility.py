"""Which vLLM this release supports."""

from __future__ import annotations

import re

import vllm
from vllm.logger import init_logger

logger = init_logger(__name__)

SUPPORTED_VLLM = ((0, 32), (0, 33))


def vllm_is_supported(version: str | None = None) -> bool:
    """Whether the installed vLLM is one that the overrides were written against.

    Args:
        version: for tests; default the installed one.
    """
    version = vllm.__version__ if version is None else version
    match = re.match(r"(\d+)\.(\d+)", version)
    supported = match is not None and (int(match[1]), int(match[2])) in SUPPORTED_VLLM
    if not supported:
        logger.warning_once(
            "vllm-treeflash supports vLLM %s; this is %s. The plugin stays inactive and "
            "method 'treeflash' is not available.",
            " and ".join(f"{major}.{minor}" for major, minor in SUPPORTED_VLLM),
            version,
        )
    return supported
