"""What both parity tests read: the recordings, and nodes named by their token path."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tests.engines import GOLDEN

#: Further recordings in the same format run without touching the code.
RECORDINGS = Path(os.environ.get("TREEFLASH_GOLDEN", GOLDEN))
TARGET = str(RECORDINGS / "e2e" / "target")
DRAFTER = str(RECORDINGS / "e2e" / "drafter")

NodePath = tuple[int, ...]


def selection_cases() -> list[dict[str, Any]]:
    return json.loads((RECORDINGS / "trees.json").read_text())


def e2e_records() -> list[dict[str, Any]]:
    return json.loads((RECORDINGS / "e2e" / "records.json").read_text())


def node_paths(tokens: list[int], parents: list[int]) -> list[NodePath]:
    """Each node's tokens from below the root to itself; the root is the empty path."""
    paths: list[NodePath] = [()]
    for token, parent in zip(tokens[1:], parents[1:]):
        paths.append((*paths[parent], token))
    return paths
