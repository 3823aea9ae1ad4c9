"""Samples at tree nodes from the V1 sampler, honouring each request's own options."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.logits_processor import LogitsProcessors, MinPLogitsProcessor
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import _SAMPLING_EPS, Sampler

from vllm_treeflash.verify.layout import VerifyLayout


class _MinPRows(MinPLogitsProcessor):
    """vLLM's min-p, applied to rows instead of requests."""

    def __init__(self, min_p: torch.Tensor) -> None:
        # Deliberately not super().__init__(): that one allocates per-request state.
        self.min_p_count = 1
        self.min_p = min_p


@dataclass(frozen=True)
class SampledRows:
    """Samples of one step.

    Attributes:
        nodes: int64 ``[T, R]``, sample at every tree node that can matter, ``-1`` elsewhere.
        last: int32 ``[B]``, sample of the requests without drafts (undefined for others).
        logprobs: of ``last``, ``None`` when no request asked.
    """

    nodes: torch.Tensor
    last: torch.Tensor | None
    logprobs: LogprobsTensors | None


def sample_nodes(
    sampler: Sampler,
    logits: torch.Tensor,
    layout: VerifyLayout,
    first_logit: torch.Tensor,
    metadata: SamplingMetadata,
) -> SampledRows:
    """Sample the nodes of every tree, and one token for each other request.

    Greedy requests: the argmax of every node, in one call. Sampled requests: node by node
    along the path, because on CPU top-p sorts the vocabulary of each row (several times the
    target's forward for a whole tree), and because a seeded request then draws exactly as
    often, and in the same order, as it would without speculation.

    Args:
        sampler: the runner's sampler.
        logits: ``[rows, vocab]``: all nodes of a request with drafts, the last token of any
            other one, in batch order. May be modified.
        layout: the step's trees.
        first_logit: int64 ``[B]``, each request's first row in ``logits``.
        metadata: per request, as vLLM built it for the batch.
    """
    trees = set(layout.request_index.tolist())
    last, logprobs = None, None
    if len(trees) < first_logit.shape[0]:
        # Requests without drafts: vLLM's sampler with vLLM's metadata. It works on whole
        # batches, so the trees' roots go along; only their generators must not advance.
        plain = {i: g for i, g in metadata.generators.items() if i not in trees}
        output = sampler(logits[first_logit], replace(metadata, generators=plain))
        last, logprobs = output.sampled_token_ids.squeeze(-1), output.logprobs_tensors

    first = first_logit[layout.request_index]
    nodes = torch.full(layout.valid.shape, -1, dtype=torch.int64, device=logits.device)
    greedy = torch.ones_like(first, dtype=torch.bool)
    if metadata.temperature is not None:
        greedy = metadata.temperature[layout.request_index] < _SAMPLING_EPS
    if greedy.any():
        chosen = layout.valid & greedy.unsqueeze(1)
        rows = (first.unsqueeze(1) + torch.arange(chosen.shape[1]))[chosen]
        every_row = rows.numel() == logits.shape[0]
        requests = layout.request_index[greedy].repeat_interleave(layout.num_rows[greedy])
        nodes[chosen] = _sample_rows(
            sampler, logits if every_row else logits[rows], requests, metadata, {}
        )
    walking = (~greedy).nonzero().squeeze(1)
    node = torch.zeros_like(walking)
    while walking.numel():
        requests = layout.request_index[walking]
        generators = {
            row: metadata.generators[request]
            for row, request in enumerate(requests.tolist())
            if request in metadata.generators
        }
        sampled = _sample_rows(
            sampler, logits[first[walking] + node], requests, metadata, generators
        )
        nodes[walking, node] = sampled
        is_child = layout.valid[walking] & (layout.parents[walking] == node.unsqueeze(1))
        follows, child = (is_child & (layout.tokens[walking] == sampled.unsqueeze(1))).max(dim=1)
        walking, node = walking[follows], child[follows]
    return SampledRows(nodes, last, logprobs)


def _sample_rows(
    sampler: Sampler,
    logits: torch.Tensor,
    row_request: torch.Tensor,
    metadata: SamplingMetadata,
    generators: dict[int, torch.Generator],
) -> torch.Tensor:
    """One sample per row; ``row_request`` says whose options apply. int64 ``[rows]``."""
    rows = expand_metadata(metadata, row_request, generators)
    return sampler(logits, rows).sampled_token_ids.squeeze(-1).long()


def expand_metadata(
    metadata: SamplingMetadata,
    row_request: torch.Tensor,
    generators: dict[int, torch.Generator],
) -> SamplingMetadata:
    """Per-row metadata of requests whose options are all node-local.

    Args:
        metadata: per request.
        row_request: int64 ``[rows]``.
        generators: by row.
    """

    def per_row(values: torch.Tensor | None) -> torch.Tensor | None:
        return None if values is None else values[row_request]

    temperature = per_row(metadata.temperature)
    # Do not pay for random sampling because of requests that are not among these rows.
    all_greedy = temperature is None or bool((temperature < _SAMPLING_EPS).all())
    processors: Sequence[_MinPRows] = ()
    if not all_greedy:
        for processor in metadata.logitsprocs.argmax_invariant:
            if isinstance(processor, MinPLogitsProcessor) and processor.min_p_count:
                processors = [_MinPRows(processor.min_p[row_request])]
    none = torch.empty(0, device=row_request.device)
    return SamplingMetadata(
        temperature=temperature,
        all_greedy=all_greedy,
        all_random=metadata.all_random and not all_greedy,
        top_p=per_row(metadata.top_p),
        top_k=per_row(metadata.top_k),
        generators=generators,
        max_num_logprobs=None,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=none,
        presence_penalties=none,
        repetition_penalties=none,
        output_token_ids=[],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(processors),
    )
