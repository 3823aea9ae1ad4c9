"""Best-first selection of the draft tree from the transition tables (OPT-Tree).

A child is never more likely than its parent, so growing the tree best-first until it holds
``budget`` nodes yields the ``budget`` most likely nodes. That allows a level-by-level form
without a heap: a node outside the ``budget - 1`` best of its own level can never be chosen,
so each level keeps that many, and one stable sort over the levels gives the node order.
"""

from __future__ import annotations

import torch

from vllm_treeflash.draft.tables import TransitionTables
from vllm_treeflash.tree import DraftTreeBatch

_NEG_INF = float("-inf")


def select_tree(
    tables: TransitionTables, budget: int, root_token_ids: torch.Tensor
) -> DraftTreeBatch:
    """Grow the most likely tree of ``budget`` nodes for every request.

    Args:
        tables: the transition tables, ``[B, depth, M, K]``.
        budget: nodes per tree **including the root**, at least 1.
        root_token_ids: int ``[B]``.

    Returns:
        The trees in selection order. A tree holds fewer nodes when the tables have fewer
        continuations of finite probability.
    """
    batch, depth, _, top_k = tables.tokens.shape
    device = tables.tokens.device
    keep = budget - 1
    log_probs = torch.nan_to_num(tables.log_probs, nan=_NEG_INF, posinf=_NEG_INF, neginf=_NEG_INF)

    # The frontier is the previous level's kept nodes; level 0 is the root in state 0.
    frontier_state = torch.zeros(batch, 1, dtype=torch.int64, device=device)
    frontier_score = torch.zeros(batch, 1, device=device)
    frontier_first = -1  # index of the frontier's first node among all kept candidates
    levels: list[tuple[torch.Tensor, ...]] = []
    num_kept = 0
    for level in range(depth if keep > 0 else 0):
        width = frontier_state.shape[1]
        rows = frontier_state.clamp(min=0).unsqueeze(2).expand(-1, -1, top_k)
        step = log_probs[:, level].gather(1, rows)
        score = frontier_score.unsqueeze(2) + step
        score = score.masked_fill(frontier_state.unsqueeze(2) < 0, _NEG_INF).flatten(1)
        # Stable: equal probabilities keep the lower rank path first.
        order = score.sort(dim=1, descending=True, stable=True).indices[:, :keep]
        score = score.gather(1, order)
        token = tables.tokens[:, level].gather(1, rows).flatten(1).gather(1, order)
        state = tables.next_state[:, level].gather(1, rows).flatten(1).gather(1, order)
        parent = order.div(top_k, rounding_mode="floor") + frontier_first
        levels.append((score, token, parent, torch.full_like(token, level + 1)))
        frontier_first = num_kept
        num_kept += min(keep, width * top_k)
        frontier_state, frontier_score = state, score

    root_token_ids = root_token_ids.to(torch.int64).view(batch, 1)
    zero = torch.zeros_like(root_token_ids)
    if not levels:
        return DraftTreeBatch(
            root_token_ids, zero - 1, zero, zero.float(), torch.ones_like(zero[:, 0])
        )

    score, token, parent, node_depth = (torch.cat(parts, dim=1) for parts in zip(*levels))
    # Shallower levels come first in the concatenation, so a child that is exactly as
    # likely as its parent still sorts behind it.
    order = score.sort(dim=1, descending=True, stable=True).indices[:, :keep]
    score = score.gather(1, order)
    valid = score > _NEG_INF
    # rank[c]: position of candidate c in the final order; parents are always chosen too.
    rank = torch.zeros_like(parent)
    rank.scatter_(1, order, torch.arange(1, order.shape[1] + 1, device=device).expand_as(order))
    chosen_parent = parent.gather(1, order)
    chosen_parent = rank.gather(1, chosen_parent.clamp(min=0)).where(chosen_parent >= 0, 0)

    def nodes(values: torch.Tensor, root: torch.Tensor) -> torch.Tensor:
        return torch.cat((root, values.where(valid, torch.zeros_like(values))), dim=1)

    return DraftTreeBatch(
        tokens=nodes(token.gather(1, order), root_token_ids),
        parents=nodes(chosen_parent, zero - 1),
        depths=nodes(node_depth.gather(1, order), zero),
        log_probs=torch.cat((zero.float(), score), dim=1),
        num_nodes=valid.sum(dim=1) + 1,
    )
