"""The walk, the committed rows and the compaction, against one-node-at-a-time loops."""

from __future__ import annotations

from itertools import chain, pairwise

import numpy as np
import pytest
import torch

from tests.unit.trees import random_tree
from vllm_treeflash.commit.features import committed_rows
from vllm_treeflash.commit.kv_cache import move_slots, moved_rows
from vllm_treeflash.tree import DraftTree
from vllm_treeflash.verify.acceptance import PLACEHOLDER_TOKEN_ID, accept
from vllm_treeflash.verify.layout import VerifyLayout

CPU = torch.device("cpu")


def walk(tree: DraftTree, sampled: list[int]) -> tuple[list[int], list[int]]:
    """Nodes on the accepted path and the committed tokens, found child by child."""
    node, nodes, tokens = 0, [0], [sampled[0]]
    while True:
        matching = [
            child
            for child in range(len(tree))
            if tree.parents[child] == node and tree.tokens[child] == sampled[node]
        ]
        if not matching:
            return nodes, tokens
        (node,) = matching
        nodes.append(node)
        tokens.append(sampled[node])


def random_step(
    rng: np.random.Generator, sizes: list[int], follow: float
) -> tuple[list[DraftTree], list[int], VerifyLayout, torch.Tensor]:
    """Trees between requests without drafts, and samples that follow children often.

    Returns:
        The trees, the rows of every request of the batch, the layout and the samples.
    """
    trees = [random_tree(rng, n, vocab=12) for n in sizes]
    lengths, request_index, first_row = [], [], []
    for tree in trees:
        lengths += rng.integers(1, 6, rng.integers(0, 3)).tolist()  # without drafts
        request_index.append(len(lengths))
        first_row.append(sum(lengths))
        lengths.append(len(tree))
    lengths += rng.integers(1, 6, rng.integers(0, 3)).tolist()
    layout = VerifyLayout.build(
        trees, request_index, first_row, rng.integers(0, 90, len(trees)).tolist(), CPU
    )
    # Garbage in the padding must not matter.
    sampled = torch.from_numpy(rng.integers(0, 12, layout.valid.shape))
    for i, tree in enumerate(trees):
        for node in range(len(tree)):
            children = [c for c in range(len(tree)) if tree.parents[c] == node]
            if children and rng.random() < follow:
                sampled[i, node] = int(tree.tokens[rng.choice(children)])
    return trees, lengths, layout, sampled


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("follow", [0.0, 0.7, 1.0])
def test_accept_and_commit(seed: int, follow: float) -> None:
    rng = np.random.default_rng(seed)
    sizes = [int(n) for n in rng.choice([1, 2, 3, 17, 64], rng.integers(1, 5))]
    trees, lengths, layout, sampled = random_step(rng, sizes, follow)
    paths = accept(layout, sampled)
    moves = list(zip(*(rows.tolist() for rows in moved_rows(layout, paths))))

    starts = np.cumsum([0, *lengths]).tolist()
    expected_rows = [list(range(a, b)) for a, b in pairwise(starts)]
    expected_moves = []
    for i, tree in enumerate(trees):
        nodes, tokens = walk(tree, sampled[i].tolist())
        n = len(nodes)
        assert int(paths.lengths[i]) == n
        assert paths.nodes[i].tolist() == nodes + [0] * (layout.max_depth + 1 - n)
        assert paths.token_ids[i].tolist() == tokens + [PLACEHOLDER_TOKEN_ID] * (
            layout.max_depth + 1 - n
        )
        first, request = int(layout.first_row[i]), int(layout.request_index[i])
        expected_rows[request] = [first + node for node in nodes]
        expected_moves += [(first + node, first + d) for d, node in enumerate(nodes) if node != d]
    assert moves == expected_moves

    rows, new_starts = committed_rows(torch.tensor(starts, dtype=torch.int32), layout, paths)
    assert rows.tolist() == list(chain(*expected_rows))
    assert new_starts.tolist() == np.cumsum([0, *map(len, expected_rows)]).tolist()


def test_rows_of_a_step_without_trees() -> None:
    rows, starts = committed_rows(torch.tensor([0, 4, 5, 12], dtype=torch.int32), None, None)
    assert rows.tolist() == list(range(12))
    assert starts.tolist() == [0, 4, 5, 12]


@pytest.mark.parametrize("seed", range(10))
def test_move_slots_with_overlapping_chains(seed: int) -> None:
    """``5 -> 3, 7 -> 5, 8 -> 7``: every destination gets what its source held before."""
    rng = np.random.default_rng(seed)
    block_size, blocks = 4, 6
    keys = torch.from_numpy(rng.random((blocks, 2, 3, block_size)))
    values = torch.from_numpy(rng.random((blocks, 5, block_size)))
    before = [(keys.clone(), values.clone()) for _ in range(2)]
    caches = [(k.clone(), v.clone()) for k, v in before]
    # A rising path 0 < n1 < n2 … over scattered slots, moved down to 1, 2, 3 …
    slots = rng.permutation(blocks * block_size)
    path = np.sort(rng.choice(np.arange(1, 20), 6, replace=False))
    source, destination = slots[path], slots[1:7]
    order = rng.permutation(6)
    move_slots(
        caches, torch.from_numpy(source[order]), torch.from_numpy(destination[order]), block_size
    )
    expected = [(k.clone(), v.clone()) for k, v in before]
    for new, old in zip(expected, before):
        for view, old_view in zip(new, old):
            for s, d in zip(source.tolist(), destination.tolist()):
                for index in np.ndindex(*view.shape[1:-1]):
                    view[(d // block_size, *index, d % block_size)] = old_view[
                        (s // block_size, *index, s % block_size)
                    ]
    for moved, wanted in zip(caches, expected):
        assert all(a.equal(b) for a, b in zip(moved, wanted))


def test_move_nothing() -> None:
    cache = torch.arange(8.0).view(2, 1, 4)
    move_slots([(cache,)], torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64), 4)
    assert cache.equal(torch.arange(8.0).view(2, 1, 4))
