"""What both parity tests read: the recordings, and nodes named by their token path."""

from __future__ import annotations

import json
from typing import Any

from tests.engines import GOLDEN

Path = tuple[int, ...]


def selection_cases() -> list[dict[str, Any]]:
    return json.loads((GOLDEN / "trees.json").read_text())


def e2e_records() -> list[dict[str, Any]]:
    return json.loads((GOLDEN / "e2e" / "records.json").read_text())


def node_paths(tokens: list[int], parents: list[int]) -> list[Path]:
    """Each node's tokens from below the root to itself; the root is the empty path."""
    paths: list[Path] = [()]
    for token, parent in zip(tokens[1:], parents[1:]):
        paths.append((*paths[parent], token))
    return paths
