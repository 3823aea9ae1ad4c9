"""The rows whose features the drafter reads: committed tokens only, in path order."""

from __future__ import annotations

import torch

from vllm_treeflash.verify.acceptance import AcceptedPaths
from vllm_treeflash.verify.layout import VerifyLayout


def committed_rows(
    query_start_loc: torch.Tensor,
    layout: VerifyLayout | None,
    paths: AcceptedPaths | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of the flattened batch that hold committed tokens after this step.

    A request without drafts contributes all its rows (a prefill chunk or one decoded
    token); a request with drafts contributes its accepted path, root first.

    Args:
        query_start_loc: int ``[B + 1]`` of the step.
        layout, paths: of the step; ``None`` when no request had drafts.

    Returns:
        ``(rows int64 [committed], query_start_loc int64 [B + 1])``, the second one
        delimiting the requests in the first.
    """
    starts = query_start_loc.to(torch.int64)
    lengths = starts[1:] - starts[:-1]
    if layout is not None and paths is not None:
        lengths = lengths.scatter(0, layout.request_index, paths.lengths)
    new_starts = torch.zeros_like(starts)
    torch.cumsum(lengths, 0, out=new_starts[1:])
    offset = torch.arange(int(new_starts[-1]), device=starts.device)
    offset -= new_starts[:-1].repeat_interleave(lengths)
    rows = starts[:-1].repeat_interleave(lengths) + offset
    if layout is not None and paths is not None:
        depth = torch.arange(paths.nodes.shape[1], device=starts.device)
        on_path = depth < paths.lengths.unsqueeze(1)
        destination = new_starts[layout.request_index].unsqueeze(1) + depth
        rows[destination[on_path]] = (layout.first_row.unsqueeze(1) + paths.nodes)[on_path]
    return rows, new_starts
