"""Best-first selection against a heap that grows the tree one node at a time."""

from __future__ import annotations

import heapq
import math

import numpy as np
import pytest
import torch

from tests.unit.trees import assert_valid_tree
from vllm_treeflash.draft.selection import select_tree
from vllm_treeflash.draft.tables import TransitionTables

NEG_INF = float("-inf")


def random_tables(
    rng: np.random.Generator,
    batch: int,
    depth: int,
    top_m: int,
    top_k: int,
    holes: float = 0.0,
    zeros: float = 0.0,
) -> TransitionTables:
    """Random tables; ``holes`` of the entries are not finite, ``zeros`` are certain."""
    shape = (batch, depth, top_m, top_k)
    log_probs = np.sort(-rng.exponential(2.0, shape).astype(np.float32), axis=-1)[..., ::-1].copy()
    log_probs[rng.random(shape) < zeros] = 0.0
    bad = rng.random(shape) < holes
    log_probs[bad] = rng.choice([NEG_INF, math.nan, math.inf], shape)[bad]
    # Different tokens within a row, as top-k gives them.
    tokens = np.argsort(rng.random((*shape[:-1], 4 * top_k)), axis=-1)[..., :top_k]
    next_state = rng.integers(-1, top_m, shape)
    next_state[:, -1] = -1
    return TransitionTables(
        torch.from_numpy(tokens), torch.from_numpy(log_probs), torch.from_numpy(next_state)
    )


def grow_with_heap(
    tables: TransitionTables, index: int, budget: int
) -> list[tuple[int, int, int, np.float32]]:
    """``(token, parent, depth, cumulative log-prob)`` of the nodes, root left out."""
    tokens = tables.tokens[index].numpy()
    log_probs = tables.log_probs[index].numpy()
    next_state = tables.next_state[index].numpy()
    nodes: list[tuple[int, int, int, np.float32]] = []
    heap: list[tuple[float, tuple[int, ...], int, int, int, np.float32]] = []

    def push_children(
        parent: int, depth: int, state: int, score: np.float32, ranks: tuple[int, ...]
    ) -> None:
        if state < 0 or depth == len(tokens):
            return
        for k, log_prob in enumerate(log_probs[depth, state]):
            if np.isfinite(log_prob):
                total = np.float32(score + log_prob)
                heapq.heappush(heap, (-float(total), (*ranks, k), parent, depth, state, total))

    push_children(0, 0, 0, np.float32(0.0), ())
    while heap and len(nodes) < budget - 1:
        _, ranks, parent, depth, state, score = heapq.heappop(heap)
        k = ranks[-1]
        nodes.append((int(tokens[depth, state, k]), parent, depth + 1, score))
        push_children(len(nodes), depth + 1, int(next_state[depth, state, k]), score, ranks)
    return nodes


def selected(
    tables: TransitionTables, budget: int, roots: list[int]
) -> list[list[tuple[int, int, int, np.float32]]]:
    """What ``select_tree`` gives, in the form of :func:`grow_with_heap`."""
    batch = select_tree(tables, budget, torch.tensor(roots))
    result = []
    for i, tree in enumerate(batch.to_host()):
        assert tree.tokens[0] == roots[i]
        columns = (tree.tokens.tolist(), tree.parents.tolist(), tree.depths.tolist())
        assert_valid_tree(*columns)
        for nodes in range(1, len(tree) + 1):
            prefix = tree.truncate(nodes)
            assert_valid_tree(
                prefix.tokens.tolist(), prefix.parents.tolist(), prefix.depths.tolist()
            )
        scores = batch.log_probs[i, 1 : len(tree)].numpy()
        result.append(list(zip(*(column[1:] for column in columns), scores)))
    return result


@pytest.mark.parametrize("budget", [1, 2, 3, 16, 64, 128])
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 1, 4), (7, 4, 4), (15, 16, 16), (5, 6, 2)])
@pytest.mark.parametrize("holes", [0.0, 0.3])
def test_equals_the_heap(budget: int, shape: tuple[int, int, int], holes: float) -> None:
    rng = np.random.default_rng([budget, *shape, holes > 0])
    tables = random_tables(rng, 3, *shape, holes=holes)
    trees = selected(tables, budget, [7, 8, 9])
    # Continuous random scores: no ties, so the node order is defined and must be equal,
    # and the scores are the same float32 sums in the same order.
    assert trees == [grow_with_heap(tables, i, budget) for i in range(3)]


@pytest.mark.parametrize("seed", range(8))
def test_ties_are_worth_what_the_heap_chooses(seed: int) -> None:
    """Children as likely as their parent (log-prob exactly 0), and equal siblings."""
    tables = random_tables(np.random.default_rng(seed), 2, 6, 4, 4, holes=0.1, zeros=0.5)
    for i, tree in enumerate(selected(tables, 24, [1, 2])):
        expected = grow_with_heap(tables, i, 24)
        assert sorted(node[3] for node in tree) == sorted(node[3] for node in expected)


def test_a_certain_path_is_followed_to_its_end() -> None:
    tables = random_tables(np.random.default_rng(0), 1, 5, 2, 3)
    tables.log_probs[..., 0] = 0.0
    tables.next_state[:, :-1, :, 0] = 0
    ((*path,),) = selected(tables, 6, [3])
    assert [node[1:] for node in path] == [(d, d + 1, 0.0) for d in range(5)]


def test_more_nodes_than_there_are() -> None:
    """A tree of all possible nodes, then padding."""
    tables = random_tables(np.random.default_rng(1), 2, 2, 2, 3)
    tables.next_state[0, 0, 0] = torch.tensor([0, -1, 1])
    tables.next_state[1, 0, 0] = -1
    batch = select_tree(tables, 128, torch.tensor([5, 6]))
    assert batch.num_nodes.tolist() == [1 + 3 + 2 * 3, 1 + 3]
    for i, n in enumerate(batch.num_nodes.tolist()):
        assert (batch.log_probs[i, n:] == NEG_INF).all()
        assert not batch.parents[i, n:].any() and not batch.tokens[i, n:].any()
    assert selected(tables, 128, [5, 6]) == [grow_with_heap(tables, i, 128) for i in (0, 1)]


def test_a_request_without_a_finite_continuation_keeps_its_root_beside_others() -> None:
    tables = random_tables(np.random.default_rng(2), 3, 4, 3, 3)
    tables.log_probs[1] = math.nan
    trees = selected(tables, 16, [1, 2, 3])
    assert trees == [grow_with_heap(tables, i, 16) for i in range(3)]
    assert trees[1] == [] and len(trees[0]) == len(trees[2]) == 15


def test_a_request_is_selected_alone_as_in_a_batch() -> None:
    tables = random_tables(np.random.default_rng(3), 4, 7, 8, 8)
    together = selected(tables, 32, [1, 2, 3, 4])
    for i in range(4):
        alone = TransitionTables(
            tables.tokens[i : i + 1], tables.log_probs[i : i + 1], tables.next_state[i : i + 1]
        )
        assert selected(alone, 32, [i + 1]) == [together[i]]
