"""Dense tree attention in plain torch: the oracle that every backend is tested against."""

from __future__ import annotations

import torch


def tree_mask(
    num_committed: int,
    depths: torch.Tensor,
    ancestors: torch.Tensor,
    sliding_window: int | None = None,
) -> torch.Tensor:
    """What each row of one tree may attend to.

    Args:
        num_committed: committed tokens with K/V before the root.
        depths: int64 ``[R]`` of the rows, root first.
        ancestors: bool ``[R, R]``.
        sliding_window: tokens a layer sees, its own position included (vLLM's
            ``sliding_window``); ``None`` for full attention.

    Returns:
        bool ``[R, num_committed + R]``, true where attention is allowed.
    """
    rows = depths.shape[0]
    context = torch.ones(rows, num_committed, dtype=torch.bool, device=depths.device)
    mask = torch.cat((context, ancestors), dim=1)
    if sliding_window is not None:
        query_position = num_committed + depths
        key_position = torch.cat(
            (torch.arange(num_committed, device=depths.device), query_position)
        )
        distance = query_position.unsqueeze(1) - key_position
        mask &= distance < sliding_window
    return mask


def dense_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Masked softmax attention in float64, grouped queries included.

    Args:
        query: ``[R, heads, head_size]``.
        key, value: ``[L, kv_heads, head_size]``.
        mask: bool ``[R, L]``.
        scale: of the scores.

    Returns:
        ``[R, heads, head_size]`` in the query's dtype.
    """
    group = query.shape[1] // key.shape[1]
    q = query.double()
    k = key.double().repeat_interleave(group, dim=1)
    v = value.double().repeat_interleave(group, dim=1)
    scores = torch.einsum("rhd,lhd->hrl", q, k) * scale
    scores = scores.masked_fill(~mask, float("-inf"))
    return torch.einsum("hrl,lhd->rhd", scores.softmax(dim=-1), v).to(query.dtype)
