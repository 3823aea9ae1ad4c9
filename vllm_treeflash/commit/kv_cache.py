"""Compaction of the paged KV cache: the accepted nodes move to contiguous slots."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from vllm_treeflash.verify.acceptance import AcceptedPaths
from vllm_treeflash.verify.layout import VerifyLayout


def moved_rows(layout: VerifyLayout, paths: AcceptedPaths) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows whose K/V must move: ``(source, destination)``, int64 ``[moves]`` each.

    The node accepted at depth ``d`` was computed in row ``first_row + node`` and belongs
    in the slot of row ``first_row + d``. Node order is topological, so ``node >= d``, and
    nodes already in place are left out.
    """
    depth = torch.arange(paths.nodes.shape[1], device=paths.nodes.device)
    moves = (depth < paths.lengths.unsqueeze(1)) & (paths.nodes != depth)
    first = layout.first_row.unsqueeze(1)
    return (first + paths.nodes)[moves], (first + depth)[moves]


def move_slots(
    caches: Iterable[tuple[torch.Tensor, ...]],
    source: torch.Tensor,
    destination: torch.Tensor,
    block_size: int,
) -> None:
    """Copy the K/V of some slots to others, in every layer.

    All sources are read before anything is written, so chains of overlapping moves
    (``5 -> 3, 7 -> 5``) are right in any order.

    Args:
        caches: per layer, views of its paged cache with the block as dimension 0 and the
            offset in the block as the **last** dimension.
        source, destination: int64 ``[moves]`` slots (``block * block_size + offset``).
        block_size: tokens per block.
    """
    if source.numel() == 0:
        return
    source_block, source_offset = source // block_size, source % block_size
    block, offset = destination // block_size, destination % block_size
    for views in caches:
        for view in views:
            view[block, ..., offset] = view[source_block, ..., source_offset]
