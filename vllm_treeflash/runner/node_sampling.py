"""One sample per node from the V1 sampler, honouring each request's own options."""

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
        nodes: int64 ``[T, R]``, sample at every tree node (undefined in the padding).
        last: int32 ``[B]``, sample of the requests without drafts (undefined for others).
        logprobs: of ``last``, ``None`` when no request asked.
        generators: by request with drafts and a seed, its generator after the draw at
            each depth.
    """

    nodes: torch.Tensor
    last: torch.Tensor | None
    logprobs: LogprobsTensors | None
    generators: dict[int, list[torch.Generator]]


def sample_nodes(
    sampler: Sampler,
    logits: torch.Tensor,
    layout: VerifyLayout,
    first_logit: torch.Tensor,
    metadata: SamplingMetadata,
) -> SampledRows:
    """Sample every node of every tree, and one token for each other request.

    Args:
        sampler: the runner's sampler.
        logits: ``[rows, vocab]``: all nodes of a request with drafts, the last token of any
            other one, in batch order. May be modified.
        layout: the step's trees.
        first_logit: int64 ``[B]``, each request's first row in ``logits``.
        metadata: per request, as vLLM built it for the batch.
    """
    requests = first_logit.shape[0]
    trees = set(layout.request_index.tolist())
    last, logprobs = None, None
    if len(trees) < requests:
        # Requests without drafts: vLLM's sampler with vLLM's metadata. It works on whole
        # batches, so the trees' roots go along; only their generators must not advance.
        plain = {i: g for i, g in metadata.generators.items() if i not in trees}
        output = sampler(logits[first_logit], replace(metadata, generators=plain))
        last, logprobs = output.sampled_token_ids.squeeze(-1), output.logprobs_tensors

    rows = (first_logit[layout.request_index].unsqueeze(1) + _arange(layout))[layout.valid]
    row_request = layout.request_index.repeat_interleave(layout.num_rows)
    row_depth = layout.depths[layout.valid]
    if rows.numel() != logits.shape[0]:
        logits = logits[rows]
    generators = {i: [g] for i, g in metadata.generators.items() if i in trees}
    sampled = _sample_rows(sampler, logits, row_request, row_depth, metadata, generators)
    nodes = torch.zeros(layout.valid.shape, dtype=torch.int64, device=logits.device)
    nodes[layout.valid] = sampled
    return SampledRows(nodes, last, logprobs, {i: g[1:] for i, g in generators.items()})


def advance_generators(
    metadata: SamplingMetadata, sampled: SampledRows, layout: VerifyLayout, lengths: torch.Tensor
) -> None:
    """Move each seeded request's generator past the draws of its committed tokens.

    Args:
        metadata: per request; its generators are changed in place.
        sampled: of the step.
        layout: of the step.
        lengths: int64 ``[T]``, committed tokens of each request with drafts.
    """
    if not sampled.generators:
        return
    for request, length in zip(layout.request_index.tolist(), lengths.tolist()):
        if request in sampled.generators:
            after = sampled.generators[request][length - 1]
            metadata.generators[request].set_state(after.get_state())


def _arange(layout: VerifyLayout) -> torch.Tensor:
    return torch.arange(layout.valid.shape[1], device=layout.valid.device)


def _sample_rows(
    sampler: Sampler,
    logits: torch.Tensor,
    row_request: torch.Tensor,
    row_depth: torch.Tensor,
    metadata: SamplingMetadata,
    generators: dict[int, list[torch.Generator]],
) -> torch.Tensor:
    """Sample rows whose request options are given by ``row_request``; int64 ``[rows]``.

    Appends to each request's list in ``generators`` its generator after each depth.
    """
    if not generators:
        return _call(sampler, logits, row_request, metadata, {})
    # A seeded request draws once per token. To emit the text it would emit without
    # speculation, all its nodes at depth d use draw d: siblings share the noise, which is
    # exact because at most one node of a depth is on the accepted path.
    seeded = torch.zeros(int(row_request.max()) + 1, dtype=torch.bool)
    seeded[list(generators)] = True
    is_seeded = seeded[row_request]
    sampled = torch.zeros(len(row_request), dtype=torch.int64, device=logits.device)
    unseeded_rows = (~is_seeded).nonzero().squeeze(1)
    if unseeded_rows.numel():
        sampled[unseeded_rows] = _call(
            sampler, logits[unseeded_rows], row_request[unseeded_rows], metadata, {}
        )
    for depth in range(int(row_depth[is_seeded].max()) + 1):
        level = (is_seeded & (row_depth == depth)).nonzero().squeeze(1)
        level_requests = row_request[level].tolist()
        row_generators = {
            i: generators[request][depth].clone_state() for i, request in enumerate(level_requests)
        }
        sampled[level] = _call(
            sampler, logits[level], row_request[level], metadata, row_generators
        )
        # Any row's generator is now one draw further: the state of the next depth.
        for request, generator in zip(level_requests, row_generators.values()):
            if len(generators[request]) == depth + 1:
                generators[request].append(generator)
    return sampled


def _call(
    sampler: Sampler,
    logits: torch.Tensor,
    row_request: torch.Tensor,
    metadata: SamplingMetadata,
    generators: dict[int, torch.Generator],
) -> torch.Tensor:
    return sampler(logits, expand_metadata(metadata, row_request, generators)).sampled_token_ids[
        :, 0
    ].long()


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
