"""The draft tree: the one data structure that drafting, verification and commit share.

A tree is stored as parallel arrays in **topological node order**: node 0 is the root
(the newest committed token, not yet run through the target), every parent stands before
its children, and so any prefix of the arrays is itself a valid tree. vLLM's scheduler
relies on that: it shortens drafts near ``max_model_len`` and at the token budget.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class DraftTree:
    """The draft tree of one request, on the host.

    Attributes:
        tokens: int64 ``[nodes]``; ``tokens[0]`` is the root token.
        parents: int64 ``[nodes]``, node indices; ``parents[0] == -1``.
        depths: int64 ``[nodes]``; ``depths[0] == 0``.
    """

    tokens: np.ndarray
    parents: np.ndarray
    depths: np.ndarray

    def __len__(self) -> int:
        return len(self.tokens)

    def truncate(self, nodes: int) -> DraftTree:
        """The first ``nodes`` nodes (root included), again a valid tree."""
        return DraftTree(self.tokens[:nodes], self.parents[:nodes], self.depths[:nodes])

    @property
    def draft_token_ids(self) -> list[int]:
        """What vLLM's scheduler is given: every node but the root, in node order."""
        return self.tokens[1:].tolist()


@dataclass(frozen=True)
class DraftTreeBatch:
    """Draft trees of several requests, padded to one width, on the device.

    Attributes:
        tokens: int64 ``[B, nodes]``.
        parents: int64 ``[B, nodes]``; ``-1`` for the root, ``0`` in the padding.
        depths: int64 ``[B, nodes]``.
        log_probs: float32 ``[B, nodes]``, cumulative along the path; ``-inf`` in the padding.
        num_nodes: int64 ``[B]``, valid nodes including the root.
    """

    tokens: torch.Tensor
    parents: torch.Tensor
    depths: torch.Tensor
    log_probs: torch.Tensor
    num_nodes: torch.Tensor

    def to_host(self) -> list[DraftTree]:
        """One :class:`DraftTree` a request, without the padding (one device read)."""
        counts = self.num_nodes.tolist()
        packed = torch.stack((self.tokens, self.parents, self.depths)).cpu().numpy()
        return [DraftTree(*packed[:, i, :n]) for i, n in enumerate(counts)]


def ancestor_mask(parents: torch.Tensor, max_depth: int) -> torch.Tensor:
    """Which nodes each node may attend to inside its tree.

    Args:
        parents: int64 ``[B, nodes]``, ``-1`` for the root.
        max_depth: an upper bound of the node depth.

    Returns:
        bool ``[B, nodes, nodes]``; ``[b, i, j]`` is true when ``j`` is ``i`` or an
        ancestor of ``i``.
    """
    batch, nodes = parents.shape
    mask = torch.eye(nodes, dtype=torch.bool, device=parents.device).repeat(batch, 1, 1)
    # The root is everyone's ancestor, so stepping past it (-1) may mark it again.
    step = parents.clamp(min=0)
    ancestor = step
    for _ in range(max_depth):
        mask.scatter_(2, ancestor.unsqueeze(2), True)
        ancestor = step.gather(1, ancestor)
    return mask
