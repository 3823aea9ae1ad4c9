"""The verification layout: how draft trees lie in the flattened batch of one step.

One row of the batch is one query token. A request with drafts contributes its root and
all nodes in node order, starting at ``first_row``; its root sits at position ``n``, the
number of committed tokens that already have K/V. A node's *position* (RoPE) is
``n + depth``, while its K/V *slot* is that of position ``n + row``: siblings share a
position and must not share a slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from vllm_treeflash.tree import DraftTree, ancestor_mask


@dataclass(frozen=True)
class VerifyLayout:
    """The trees of one step, padded to the widest; ``T`` requests with drafts, ``R`` rows.

    Attributes:
        request_index: int64 ``[T]``, index of the request in the batch.
        first_row: int64 ``[T]``, row of the root in the flattened batch.
        num_rows: int64 ``[T]``, nodes including the root.
        num_committed: int64 ``[T]``, position of the root.
        tokens: int64 ``[T, R]``.
        parents: int64 ``[T, R]``; ``-1`` for the root, ``0`` in the padding.
        depths: int64 ``[T, R]``.
        valid: bool ``[T, R]``, false in the padding.
        ancestors: bool ``[T, R, R]``, see :func:`vllm_treeflash.tree.ancestor_mask`.
        max_depth: the deepest node of the step.
    """

    request_index: torch.Tensor
    first_row: torch.Tensor
    num_rows: torch.Tensor
    num_committed: torch.Tensor
    tokens: torch.Tensor
    parents: torch.Tensor
    depths: torch.Tensor
    valid: torch.Tensor
    ancestors: torch.Tensor
    max_depth: int

    @classmethod
    def build(
        cls,
        trees: Sequence[DraftTree],
        request_index: Sequence[int],
        first_row: Sequence[int],
        num_committed: Sequence[int],
        device: torch.device,
    ) -> VerifyLayout:
        """Lay out one step's trees (at least one)."""
        num_rows = np.array([len(tree) for tree in trees], dtype=np.int64)
        tokens, parents, depths = np.zeros((3, len(trees), int(num_rows.max())), dtype=np.int64)
        for i, tree in enumerate(trees):
            tokens[i, : len(tree)] = tree.tokens
            parents[i, : len(tree)] = tree.parents
            depths[i, : len(tree)] = tree.depths

        def to_device(values: np.ndarray | Sequence[int]) -> torch.Tensor:
            return torch.as_tensor(np.asarray(values, dtype=np.int64)).to(device)

        device_parents = to_device(parents)
        device_num_rows = to_device(num_rows)
        max_depth = int(depths.max())
        arange = torch.arange(parents.shape[1], device=device)
        return cls(
            request_index=to_device(request_index),
            first_row=to_device(first_row),
            num_rows=device_num_rows,
            num_committed=to_device(num_committed),
            tokens=to_device(tokens),
            parents=device_parents,
            depths=to_device(depths),
            valid=arange < device_num_rows.unsqueeze(1),
            ancestors=ancestor_mask(device_parents, max_depth),
            max_depth=max_depth,
        )

    @property
    def rows(self) -> torch.Tensor:
        """int64 ``[sum(num_rows)]``: the flattened-batch row of every node, in order."""
        arange = torch.arange(self.valid.shape[1], device=self.valid.device)
        return (self.first_row.unsqueeze(1) + arange)[self.valid]

    @property
    def positions(self) -> torch.Tensor:
        """int64 ``[sum(num_rows)]``: the RoPE position of every node, aligned with ``rows``."""
        return (self.num_committed.unsqueeze(1) + self.depths)[self.valid]
