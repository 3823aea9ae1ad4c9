"""Random trees and the naive, one-node-at-a-time view of them."""

from __future__ import annotations

import numpy as np

from vllm_treeflash.tree import DraftTree


def random_tree(
    rng: np.random.Generator, nodes: int, vocab: int = 50, max_depth: int = 8
) -> DraftTree:
    """A tree in topological order whose siblings carry different tokens."""
    tokens, parents, depths = [int(rng.integers(vocab))], [-1], [0]
    children: dict[int, set[int]] = {0: set()}
    while len(tokens) < nodes:
        parent = int(rng.integers(len(tokens)))
        token = int(rng.integers(vocab))
        if depths[parent] == max_depth or token in children[parent]:
            continue
        children[parent].add(token)
        children[len(tokens)] = set()
        tokens.append(token)
        parents.append(parent)
        depths.append(depths[parent] + 1)
    return DraftTree(np.array(tokens), np.array(parents), np.array(depths))


def ancestors_of(parents: list[int], node: int) -> list[int]:
    """The node itself and all nodes above it, root last."""
    path = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path


def assert_valid_tree(tokens: list[int], parents: list[int], depths: list[int]) -> None:
    """Root first, parents before children, depths right, no token twice among siblings."""
    assert (parents[0], depths[0]) == (-1, 0)
    edges = set()
    for node in range(1, len(tokens)):
        assert 0 <= parents[node] < node
        assert depths[node] == depths[parents[node]] + 1
        edges.add((parents[node], tokens[node]))
    assert len(edges) == len(tokens) - 1
