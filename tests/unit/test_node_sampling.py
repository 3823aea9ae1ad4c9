"""Samples at nodes, against vLLM's sampler called for one request and one node at a time."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import (
    BatchUpdate,
    LogitsProcessors,
    MinPLogitsProcessor,
)
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler

from tests.unit.trees import random_tree
from vllm_treeflash.runner.node_sampling import expand_metadata, sample_nodes
from vllm_treeflash.verify.acceptance import accept
from vllm_treeflash.verify.layout import VerifyLayout

CPU = torch.device("cpu")
VOCAB = 40

PARAMS = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.7, top_k=5),
    SamplingParams(temperature=1.5, top_p=0.6),
    SamplingParams(temperature=1.2, min_p=0.3),
    SamplingParams(temperature=0.9, top_k=9, top_p=0.8, min_p=0.05),
    SamplingParams(temperature=0.0, min_p=0.5),
]


def stock_metadata(
    params: Sequence[SamplingParams], generators: dict[int, torch.Generator]
) -> SamplingMetadata:
    """What vLLM's input batch builds for these requests."""
    config: Any = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=16))
    min_p = MinPLogitsProcessor(config, CPU, False)
    added: Any = [(i, p, None, []) for i, p in enumerate(params)]
    min_p.update_state(BatchUpdate(len(params), removed=[], added=added, moved=[]))
    random = [p.temperature > 0 for p in params]

    def tensor(values: list[Any]) -> torch.Tensor:
        return torch.tensor(values)

    none = torch.empty(0)
    return SamplingMetadata(
        temperature=tensor([p.temperature for p in params]) if any(random) else None,
        all_greedy=not any(random),
        all_random=all(random),
        top_p=tensor([p.top_p for p in params]) if any(p.top_p < 1 for p in params) else None,
        top_k=tensor([p.top_k or VOCAB for p in params]) if any(p.top_k for p in params) else None,
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
        logitsprocs=LogitsProcessors([min_p]),
    )


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def sample_alone(logits: torch.Tensor, params: SamplingParams, noise: torch.Generator) -> int:
    """vLLM's sampler on one row, as for a plain decode of one request."""
    metadata = stock_metadata([params], {0: noise})
    return int(Sampler()(logits.clone().unsqueeze(0), metadata).sampled_token_ids)


@pytest.mark.parametrize("requests", [range(7), [1, 6], [0, 2, 5], [4], [3, 1]])
def test_every_row_is_sampled_with_its_requests_options(requests: Sequence[int]) -> None:
    rng = np.random.default_rng(len(requests))
    row_request = torch.from_numpy(rng.choice(list(requests), 64))
    logits = torch.randn(64, VOCAB, generator=generator(1)) * 2
    metadata = expand_metadata(
        stock_metadata(PARAMS, {}), row_request, {row: generator(row) for row in range(64)}
    )
    sampled = Sampler()(logits.clone(), metadata).sampled_token_ids.squeeze(1).tolist()
    # The same noise for a row alone and in the batch: the tokens are equal, not just alike.
    assert sampled == [
        sample_alone(logits[row], PARAMS[request], generator(row))
        for row, request in enumerate(row_request.tolist())
    ]


def test_greedy_rows_beside_random_requests_do_no_random_work() -> None:
    metadata = expand_metadata(stock_metadata(PARAMS, {}), torch.tensor([1, 6, 6]), {})
    assert metadata.all_greedy and not metadata.all_random
    assert not metadata.logitsprocs.argmax_invariant


@pytest.mark.parametrize("seed", range(8))
def test_nodes_of_a_mixed_batch(seed: int) -> None:
    """Seeded requests: the tokens, and the state of the seed, of decoding one by one."""
    rng = np.random.default_rng(seed)
    has_tree = rng.permutation([True] * 5 + [False] * 2).tolist()
    trees = [random_tree(rng, int(rng.integers(1, 30)), vocab=VOCAB) for _ in range(5)]
    counts = [0] * 7
    for index, tree in zip([i for i, tree in enumerate(has_tree) if tree], trees):
        counts[index] = len(tree)
    counts = [count or 1 for count in counts]
    first_logit = torch.tensor(np.cumsum([0, *counts[:-1]]))
    request_index = [i for i, tree in enumerate(has_tree) if tree]
    layout = VerifyLayout.build(
        trees, request_index, first_logit[request_index].tolist(), [9] * 5, CPU
    )
    # Logits that favour the tokens of a node's children, so that walks get somewhere.
    logits = torch.randn(sum(counts), VOCAB, generator=generator(seed))
    for index, tree in zip(request_index, trees):
        for node in range(1, len(tree)):
            row = int(first_logit[index]) + int(tree.parents[node])
            logits[row, int(tree.tokens[node])] += 4.0
    generators = {i: generator(100 + i) for i in range(7)}
    sampled = sample_nodes(
        Sampler(), logits.clone(), layout, first_logit, stock_metadata(PARAMS, generators)
    )
    paths = accept(layout, sampled.nodes)

    expected = {i: generator(100 + i) for i in range(7)}
    for t, (index, tree) in enumerate(zip(request_index, trees)):
        node, tokens = 0, []
        while True:
            row = int(first_logit[index]) + node
            tokens.append(sample_alone(logits[row], PARAMS[index], expected[index]))
            children = [
                child
                for child in range(len(tree))
                if tree.parents[child] == node and tree.tokens[child] == tokens[-1]
            ]
            if not children:
                break
            (node,) = children
        assert paths.token_ids[t, : int(paths.lengths[t])].tolist() == tokens
    for index in set(range(7)) - set(request_index):
        assert sampled.last is not None
        assert int(sampled.last[index]) == sample_alone(
            logits[int(first_logit[index])], PARAMS[index], expected[index]
        )
    for index in range(7):
        if PARAMS[index].temperature > 0:  # a greedy request draws nothing that counts
            assert generators[index].get_state().equal(expected[index].get_state())
