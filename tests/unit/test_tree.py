"""The tree, its ancestor mask and its place in the batch, against naive loops."""

from __future__ import annotations

import numpy as np
import torch

from tests.unit.trees import ancestors_of, random_tree
from vllm_treeflash.tree import ancestor_mask
from vllm_treeflash.verify.layout import VerifyLayout

CPU = torch.device("cpu")


def test_ancestor_mask() -> None:
    rng = np.random.default_rng(0)
    for nodes in (1, 2, 5, 33, 128):
        trees = [random_tree(rng, nodes) for _ in range(3)]
        parents = torch.from_numpy(np.stack([tree.parents for tree in trees]))
        deepest = max(int(tree.depths.max()) for tree in trees)
        mask = ancestor_mask(parents, deepest)
        assert mask.equal(ancestor_mask(parents, deepest + 3))
        for b in range(3):
            for i in range(nodes):
                seen = mask[b, i].nonzero().squeeze(1).tolist()
                assert seen == sorted(ancestors_of(trees[b].parents.tolist(), i))


def test_layout() -> None:
    rng = np.random.default_rng(1)
    sizes, request_index = [4, 1, 17, 9], [0, 2, 3, 6]
    first_row, num_committed = [3, 20, 40, 57], [100, 7, 0, 63]
    trees = [random_tree(rng, n) for n in sizes]
    layout = VerifyLayout.build(trees, request_index, first_row, num_committed, CPU)

    rows, positions = [], []
    for tree, first, committed in zip(trees, first_row, num_committed):
        for node in range(len(tree)):
            rows.append(first + node)
            positions.append(committed + int(tree.depths[node]))
    assert layout.rows.tolist() == rows
    assert layout.positions.tolist() == positions
    assert layout.request_index.tolist() == request_index
    assert layout.num_rows.tolist() == sizes
    assert layout.max_depth == max(int(tree.depths.max()) for tree in trees)
    for i, tree in enumerate(trees):
        n = len(tree)
        assert layout.valid[i].tolist() == [node < n for node in range(max(sizes))]
        assert layout.tokens[i, :n].tolist() == tree.tokens.tolist()
        assert layout.parents[i, :n].tolist() == tree.parents.tolist()
        assert layout.depths[i, :n].tolist() == tree.depths.tolist()
        for node in range(n):
            seen = layout.ancestors[i, node].nonzero().squeeze(1).tolist()
            assert seen == sorted(ancestors_of(tree.parents.tolist(), node))


def test_a_prefix_is_laid_out_like_the_whole() -> None:
    """What the scheduler cuts off changes nothing for the nodes that stay."""
    tree = random_tree(np.random.default_rng(2), 40)
    whole = VerifyLayout.build([tree], [0], [5], [11], CPU)
    for nodes in (1, 2, 13, 39):
        part = VerifyLayout.build([tree.truncate(nodes)], [0], [5], [11], CPU)
        assert part.positions.equal(whole.positions[:nodes])
        assert part.ancestors.equal(whole.ancestors[:, :nodes, :nodes])
        assert part.tokens.equal(whole.tokens[:, :nodes])
