"""Every recorded generation, step by step, on the real vLLM engine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest

from tests.engines import greedy, make_llm, runner_of, speculative_config
from tests.parity.recordings import DRAFTER, TARGET, NodePath, e2e_records, node_paths
from vllm_treeflash.draft.tables import TransitionTables
from vllm_treeflash.runner import v1
from vllm_treeflash.tree import DraftTreeBatch
from vllm_treeflash.verify.acceptance import AcceptedPaths
from vllm_treeflash.verify.layout import VerifyLayout

#: How far apart the cumulative log-probabilities of two nodes may be that the two programs
#: choose or order differently. Both compute in float32, with operators in another order: a
#: log-probability of size 8 has steps of 2**-20 (1e-6), and a path adds up to 7 of them.
NEAR_TIE = 1e-5

CONFIG_KEYS = ("budget", "chain", "top_m", "top_k", "drafter_temperature")
RECORDS = e2e_records()


def _config_of(record: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(record.get(key) for key in CONFIG_KEYS)


def _name(record: dict[str, Any]) -> str:
    return "chain" if record.get("chain") else f"budget{record['budget']}"


#: One engine serves all records of a configuration.
BY_CONFIG: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
for _record in RECORDS:
    BY_CONFIG.setdefault(_config_of(_record), []).append(_record)


@dataclass
class Step:
    """One verified tree of a batch of one."""

    tokens: list[int]
    parents: list[int]
    accepted: list[int]
    tables: TransitionTables

    def log_prob(self, path: NodePath) -> float:
        """What a node is worth in this step's tables; a node they lack raises."""
        state, total = 0, 0.0
        for depth, token in enumerate(path):
            row = self.tables.tokens[0, depth, state].tolist()
            k = row.index(token)
            total += float(self.tables.log_probs[0, depth, state, k])
            state = int(self.tables.next_state[0, depth, state, k])
        return total


@dataclass
class RecordedEngine:
    """A running engine that notes every tree it drafts and every walk."""

    llm: Any
    steps: list[Step] = field(default_factory=list)
    _tables: TransitionTables | None = None

    def select_tree(self, tables: TransitionTables, *args: Any) -> DraftTreeBatch:
        self._tables = tables
        return select_tree(tables, *args)

    def accept(self, layout: VerifyLayout, sampled: Any) -> AcceptedPaths:
        paths = accept(layout, sampled)
        assert self._tables is not None
        if layout.num_rows.numel() == 1:
            rows, length = int(layout.num_rows), int(paths.lengths)
            self.steps.append(
                Step(
                    layout.tokens[0, :rows].tolist(),
                    layout.parents[0, :rows].tolist(),
                    paths.nodes[0, :length].tolist(),
                    self._tables,
                )
            )
        return paths


select_tree, accept = v1.select_tree, v1.accept


@pytest.fixture(scope="module")
def engine(request: pytest.FixtureRequest) -> Iterator[RecordedEngine]:
    budget, chain, top_m, top_k, temperature = request.param
    keys: dict[str, Any] = {
        "treeflash_top_m": top_m,
        "treeflash_top_k": top_k,
        "treeflash_draft_temperature": temperature,
    }
    if chain:
        keys["treeflash_mode"] = "chain"
    else:
        keys["num_speculative_tokens"] = budget - 1
    with make_llm(
        model=TARGET,
        max_model_len=max(len(r["prompt"]) + r["max_new_tokens"] for r in RECORDS) + 64,
        speculative_config=speculative_config(model=DRAFTER, **keys),
    ) as llm:
        recorded = RecordedEngine(llm)
        with (
            mock.patch.object(v1, "select_tree", recorded.select_tree),
            mock.patch.object(v1, "accept", recorded.accept),
        ):
            yield recorded


def _generate(engine: RecordedEngine, records: list[dict[str, Any]]) -> list[list[int]]:
    # The recording's last step may commit more than max_new_tokens leaves room for.
    room = 1 + runner_of(engine.llm).drafter.block_depth
    return greedy(
        engine.llm,
        [record["prompt"] for record in records],
        max_tokens=max(record["max_new_tokens"] for record in records) + room,
    )


@pytest.mark.parametrize(
    ("engine", "record"),
    [pytest.param(_config_of(r), r, id=f"{_name(r)}-prompt{len(r['prompt'])}") for r in RECORDS],
    indirect=["engine"],
    scope="module",
)
def test_generation_follows_the_recording(engine: RecordedEngine, record: dict[str, Any]) -> None:
    engine.steps.clear()
    (output,) = _generate(engine, [record])

    assert output[: len(record["output"])] == record["output"]
    lengths = [len(step.accepted) for step in engine.steps]
    assert lengths[: len(record["acceptance_lengths"])] == record["acceptance_lengths"]
    assert len(engine.steps) >= len(record["steps"]) > 0
    for step, recorded in zip(engine.steps, record["steps"]):
        if (step.tokens[1:], step.parents) == (recorded["tokens"][1:], recorded["parents"]):
            assert step.accepted == recorded["accepted"]
        else:
            _assert_near_tie(step, recorded)


def _assert_near_tie(step: Step, recorded: dict[str, Any]) -> None:
    """The trees differ, but only in nodes that are equally likely to float accuracy.

    Node by node in selection order, the recorded choice is worth what ours is. So nodes
    swapped places, or took one another's place at the cut, only with a near equal.
    """
    ours = node_paths(step.tokens, step.parents)
    theirs = node_paths(recorded["tokens"], recorded["parents"])
    assert len(ours) == len(theirs)
    assert [step.log_prob(path) for path in theirs] == pytest.approx(
        [step.log_prob(path) for path in ours], abs=NEAR_TIE
    )
    # The same tokens were accepted, in whatever rows they stood.
    assert [ours[i] for i in step.accepted] == [theirs[i] for i in recorded["accepted"]]


@pytest.mark.parametrize(
    ("engine", "records"),
    [pytest.param(config, records, id=_name(records[0])) for config, records in BY_CONFIG.items()],
    indirect=["engine"],
    scope="module",
)
def test_batched_generation_gives_the_recorded_outputs(
    engine: RecordedEngine, records: list[dict[str, Any]]
) -> None:
    outputs = _generate(engine, records)
    assert len(records) > 1
    for output, record in zip(outputs, records):
        assert output[: len(record["output"])] == record["output"]
