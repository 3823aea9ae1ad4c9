"""The walk: which path of each tree the target's own samples follow.

A token has been sampled from the target's processed distribution at every node that the walk
can reach (``-1`` marks the others, where nothing can be accepted).
Starting at the root, the walk moves to the child whose token equals the sample, and stops
where there is none; that last sample is the bonus token. The tree was fixed before the
samples were drawn, so every emitted token has exactly the target's distribution.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_treeflash.verify.layout import VerifyLayout

#: vLLM's placeholder for "no token here" (``vllm.v1.sample.rejection_sampler``).
PLACEHOLDER_TOKEN_ID = -1


@dataclass(frozen=True)
class AcceptedPaths:
    """The accepted path of each tree; ``D = max_depth + 1`` columns.

    Attributes:
        nodes: int64 ``[T, D]``, node (row offset in the tree) at each depth of the path;
            column 0 is the root. Beyond the path: 0.
        lengths: int64 ``[T]``, nodes on the path including the root, which is also the
            number of committed tokens (accepted drafts + bonus): the acceptance length.
        token_ids: int64 ``[T, D]``, the committed tokens; ``-1`` beyond the length.
    """

    nodes: torch.Tensor
    lengths: torch.Tensor
    token_ids: torch.Tensor


def accept(layout: VerifyLayout, sampled: torch.Tensor) -> AcceptedPaths:
    """Walk every tree at once.

    Args:
        layout: the step's trees.
        sampled: int ``[T, R]``, the target's sample at every node, ``-1`` where none was
            drawn; padding is ignored.
    """
    sampled = sampled.to(torch.int64)
    matched = layout.tokens == sampled.gather(1, layout.parents.clamp(min=0))
    matched[:, 0] = True
    matched &= layout.valid
    # A node is on the path when it and all its ancestors match. Siblings carry different
    # tokens, so at most one node a depth does.
    on_path = (matched.unsqueeze(1) | ~layout.ancestors).all(dim=2) & layout.valid
    lengths = on_path.sum(dim=1)

    trees, width = on_path.shape
    columns = layout.max_depth + 1
    node = torch.arange(width, device=sampled.device).expand(trees, width)
    # Nodes off the path are sent to a column that is cut off again.
    column = layout.depths.where(on_path, columns)
    nodes = torch.zeros(trees, columns + 1, dtype=torch.int64, device=sampled.device)
    nodes = nodes.scatter_(1, column, node)[:, :columns]
    depth = torch.arange(columns, device=sampled.device)
    on_length = depth < lengths.unsqueeze(1)
    nodes = nodes.where(on_length, 0)
    token_ids = sampled.gather(1, nodes).where(on_length, PLACEHOLDER_TOKEN_ID)
    return AcceptedPaths(nodes, lengths, token_ids)
