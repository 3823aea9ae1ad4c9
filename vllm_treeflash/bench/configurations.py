"""What is compared: one :class:`Configuration` per vLLM engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

#: plain: no speculation · dflash: vLLM's own method on the same backbone · chain: TreeFlash's
#: single path with the AR head · marginal: tree without the AR head · tree: TreeFlash.
MODES = ("plain", "dflash", "chain", "marginal", "tree")
_MODES_WITH_BUDGET = ("marginal", "tree")
PLAIN = "plain"


@dataclass(frozen=True)
class Configuration:
    """One engine of the run."""

    name: str
    """As shown in the tables: the mode, and the budget where there is one."""
    mode: str
    """One of :data:`MODES`."""
    budget: int
    """Rows verified per request and step, the root included; 1 for plain."""
    speculative_config: dict[str, Any] | None
    """vLLM's ``speculative_config``."""


def build_configurations(
    modes: Sequence[str],
    budgets: Sequence[int],
    *,
    draft: str,
    headless_draft: str,
    block_size: int,
    tree_options: dict[str, Any],
) -> list[Configuration]:
    """The engines to run, in the order of :data:`MODES`, small budgets first.

    Args:
        modes: which of :data:`MODES`.
        budgets: nodes including the root, for the tree modes.
        draft, headless_draft: checkpoints with and without the AR head.
        block_size: of the checkpoint; a chain has ``block_size - 1`` draft tokens.
        tree_options: ``treeflash_*`` keys for every TreeFlash engine.
    """
    if unknown := sorted(set(modes) - set(MODES)):
        raise ValueError(f"unknown mode {', '.join(unknown)}; choose from {', '.join(MODES)}")
    if not budgets or min(budgets) < 2:
        raise ValueError(f"budgets {list(budgets)} must be at least 2 (the root and one draft)")

    def speculative(mode: str, budget: int) -> dict[str, Any] | None:
        if mode == PLAIN:
            return None
        config: dict[str, Any] = {
            "method": "dflash" if mode == "dflash" else "treeflash",
            "model": headless_draft if mode in ("dflash", "marginal") else draft,
            "num_speculative_tokens": budget - 1,
        }
        if mode != "dflash":
            config |= {**tree_options, "treeflash_mode": "chain" if mode == "chain" else "tree"}
        return config

    configurations = []
    for mode in MODES:
        if mode not in modes:
            continue
        if mode in _MODES_WITH_BUDGET:
            chosen = [(f"{mode} {budget}", budget) for budget in sorted(set(budgets))]
        else:
            chosen = [(mode, 1 if mode == PLAIN else block_size)]
        configurations += [
            Configuration(name, mode, budget, speculative(mode, budget)) for name, budget in chosen
        ]
    return configurations


def in_groups(configurations: Sequence[Configuration], resident: int) -> list[list[Configuration]]:
    """Groups of at most ``resident`` engines, each with the plain one if it is wanted."""
    plain = [c for c in configurations if c.mode == PLAIN]
    others = [c for c in configurations if c.mode != PLAIN]
    size = resident - len(plain)
    return [plain + others[i : i + size] for i in range(0, max(len(others), 1), size)]
