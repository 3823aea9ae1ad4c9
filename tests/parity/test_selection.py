"""Every recorded selection case, against the reference program's trees."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.parity.recordings import selection_cases
from vllm_treeflash.draft.selection import select_tree
from vllm_treeflash.draft.tables import TransitionTables

CASES = selection_cases()


def _tables(case: dict[str, Any]) -> TransitionTables:
    log_probs = [
        [[float("-inf") if x is None else x for x in row] for row in level]
        for level in case["transition_log_probs"]
    ]
    return TransitionTables(
        tokens=torch.tensor([case["transition_tokens"]]),
        log_probs=torch.tensor([log_probs]),
        next_state=torch.tensor([case["transition_next"]]),
    )


def _recorded_log_probs(case: dict[str, Any]) -> list[float]:
    """Cumulative log-probabilities of the recorded nodes, looked up in the case's tables.

    A tied case may hold the same token twice in a row of the table; every such choice is
    worth the same, so the first is as good as any.
    """
    sums, states = [0.0], [0]
    for token, parent, depth in list(zip(case["tokens"], case["parents"], case["depths"]))[1:]:
        row = case["transition_tokens"][depth - 1][states[parent]]
        k = row.index(token)
        log_prob = case["transition_log_probs"][depth - 1][states[parent]][k]
        sums.append(sums[parent] + float("-inf" if log_prob is None else log_prob))
        states.append(case["transition_next"][depth - 1][states[parent]][k])
    return sums


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_tree_equals_the_recorded_tree(case: dict[str, Any]) -> None:
    batch = select_tree(_tables(case), case["budget"], torch.tensor([0]))
    (tree,) = batch.to_host()
    if not case.get("ties"):
        assert tree.tokens.tolist() == case["tokens"]
        assert tree.parents.tolist() == case["parents"]
        assert tree.depths.tolist() == case["depths"]
        return
    # Which of equally likely nodes is taken is not defined; what they are worth is. Sums of
    # up to 15 float32 terms (ours) against float64 ones (theirs): 15 * 2**-24 * |sum| < 1e-4.
    ours = sorted(batch.log_probs[0, : len(tree)].tolist())
    assert ours == pytest.approx(sorted(_recorded_log_probs(case)), abs=1e-4)
