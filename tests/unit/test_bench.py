"""The benchmark's pure parts, against figures worked out by hand."""

from __future__ import annotations

import argparse
import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from vllm_treeflash.bench import cli, measure, table
from vllm_treeflash.bench.checkpoint import write_headless
from vllm_treeflash.bench.configurations import build_configurations, in_groups
from vllm_treeflash.bench.measure import Batch, Request, Step
from vllm_treeflash.bench.prompts import load_prompts
from vllm_treeflash.bench.worker import StepRecorder


def _request(name: str, prompt: int, tokens: list[int], accepted: list[int]) -> Request:
    return Request(name, prompt, tokens, "length", accepted, drafted=15 * len(accepted))


def _step(seconds: float, requests: int = 1, *, prefill: bool = False, **phases: float) -> Step:
    return Step(seconds, requests, prefill, phases)


#: Two requests, alone: "a" commits 3 + 1 + 2 tokens in three verifying steps and one token in
#: a step without drafts; "b" commits 8 in one step, of which max_tokens lets 4 through.
_PREFILL = _step(0.5, prefill=True, verify=0.4, draft=0.05, tables=0.05)
_TREE = [
    Batch(
        "tree 16",
        1,
        0,
        0,
        seconds=2.0,
        requests=[_request("a", 0, list(range(8)), [2, 0, 1])],
        steps=[
            _PREFILL,
            _step(0.30, verify=0.20, draft=0.04, tables=0.02, select=0.01, sample=0.01, commit=0),
            _step(0.20, verify=0.10, draft=0.04, tables=0.02, select=0.01, sample=0.01, commit=0),
            _step(0.25, verify=0.15, draft=0.04, tables=0.02, select=0.01, sample=0.01, commit=0),
            _step(0.05, verify=0.05, draft=0.00, tables=0.00, select=0.00, sample=0.00, commit=0),
        ],
    ),
    Batch(
        "tree 16",
        1,
        0,
        0,
        seconds=1.0,
        requests=[_request("b", 0, [9, 8, 7, 6, 5], [7])],
        steps=[
            _PREFILL,
            _step(0.20, verify=0.10, draft=0.04, tables=0.02, select=0.01, sample=0.01, commit=0),
        ],
    ),
]
_PLAIN = [
    Batch(
        "plain",
        1,
        0,
        0,
        seconds=2.5,
        requests=[_request("a", 0, list(range(8)), [])],
        steps=[_step(0.5, prefill=True, verify=0.4)] + 7 * [_step(0.2, verify=0.15)],
    ),
    Batch(
        "plain",
        1,
        0,
        0,
        seconds=1.5,
        requests=[_request("b", 0, [9, 8, 7, 6, 0], [])],
        steps=[_step(0.5, prefill=True, verify=0.4)] + 4 * [_step(0.2, verify=0.15)],
    ),
]


def test_block_efficiency_is_the_mean_over_verifying_steps() -> None:
    requests = [request for batch in _TREE for request in batch.requests]
    # (3 + 1 + 2 + 8) / 4, as 1 + accepted / drafts = 1 + 10 / 4
    assert measure.block_efficiency(requests) == pytest.approx(3.5)
    assert measure.block_efficiency_by_set(_TREE) == {"a": pytest.approx(2.0), "b": 8.0}
    assert measure.block_efficiency(_PLAIN[0].requests) is None


def test_accepted_per_depth_counts_paths_that_reach_it() -> None:
    requests = [request for batch in _TREE for request in batch.requests]
    # Accepted 2, 0, 1, 7: depth 1 is reached by three, 2 by two, 3 to 7 by one of four.
    assert measure.accepted_per_depth(requests) == [0.75, 0.5, 0.25, 0.25, 0.25, 0.25, 0.25]
    assert measure.accepted_per_depth([]) == []


def test_figures_of_a_speculating_configuration() -> None:
    figures = measure.summarise(_TREE, _PLAIN, compare_tokens=True)
    # 8 + 5 tokens in 3 s; plain the same in 4 s.
    assert figures.tokens_per_second == pytest.approx(13 / 3)
    assert figures.ratio_to_plain == pytest.approx(4 / 3)
    # Without the prefill steps and the tokens they yield: 11 tokens in 1 s; plain 11 in 2.2 s.
    assert figures.decode_tokens_per_second == pytest.approx(11.0)
    assert figures.decode_ratio_to_plain == pytest.approx(2.2)
    assert figures.tokens_per_forward == pytest.approx(11 / 5)
    assert figures.step_seconds == pytest.approx(0.2)
    assert figures.verify_seconds == pytest.approx(0.60 / 5)
    assert figures.draft_seconds == pytest.approx(0.24 / 5)
    # 11 tokens in 0.60 + 0.24 s.
    assert figures.bound_tokens_per_second == pytest.approx(11 / 0.84)
    assert figures.share_of_bound == pytest.approx(0.84)
    assert figures.overhead_share == pytest.approx(0.16)
    assert figures.shares == pytest.approx(
        {
            "verify": 0.60,
            "draft": 0.16,
            "tables": 0.08,
            "select": 0.04,
            "sample": 0.04,
            "commit": 0.0,
            "other": 0.08,
        }
    )
    assert (figures.decode_steps, figures.prefill_steps, figures.output_tokens) == (5, 2, 13)
    assert figures.different_from_plain == 1  # "b" ends in another token


def test_figures_of_plain() -> None:
    figures = measure.summarise(_PLAIN, _PLAIN, compare_tokens=True)
    assert figures.ratio_to_plain == figures.decode_ratio_to_plain == 1.0
    assert figures.tokens_per_forward == 1.0
    assert figures.step_seconds == pytest.approx(0.2)  # t1
    assert figures.verify_seconds == pytest.approx(0.15)
    assert figures.draft_seconds is figures.bound_tokens_per_second is None
    assert figures.shares == pytest.approx({"verify": 0.75, "other": 0.25})
    assert figures.different_from_plain == 0


def test_a_batch_of_several_requests_counts_each_in_a_forward() -> None:
    batch = Batch(
        "tree 16",
        2,
        0,
        0,
        seconds=1.0,
        requests=[_request("a", 0, [1, 2, 3, 4], [1, 0]), _request("a", 1, [5, 6, 7], [1])],
        steps=[
            _step(0.2, 2, prefill=True, verify=0.1, draft=0.1, tables=0.0),
            _step(0.5, 2, verify=0.3, draft=0.1, tables=0.0),
            _step(0.3, 1, verify=0.2, draft=0.0, tables=0.0),
        ],
    )
    figures = measure.summarise([batch], None, compare_tokens=True)
    assert figures.tokens_per_forward == pytest.approx(5 / 3)
    # 5 decoded tokens in two steps, (0.3 + 0.2) / 2 + 0.1 / 2 s each.
    assert figures.bound_tokens_per_second == pytest.approx(2.5 / 0.3)
    assert figures.ratio_to_plain is None
    assert figures.different_from_plain is None


def test_tokens_are_not_compared_when_sampling() -> None:
    assert measure.summarise(_TREE, _PLAIN, compare_tokens=False).different_from_plain is None


def test_headless_checkpoint_is_the_plain_dflash_layout(tmp_path) -> None:
    source = tmp_path / "treeflash"
    source.mkdir()
    weights = {
        "model.norm.weight": torch.arange(4, dtype=torch.bfloat16),
        "model.layers.0.mlp.up_proj.weight": torch.randn(3, 4),
        "ar_approximation.norm.weight": torch.ones(4),
        "ar_approximation.ug.weight": torch.ones(6, 8),
    }
    save_file(weights, source / "model.safetensors")
    config = {
        "architectures": ["TreeFlashDraftModel"],
        "auto_map": {"AutoModel": "x.Y"},
        "block_size": 8,
        "dflash_config": {"mask_token_id": 5},
        "treeflash_config": {"ar_approximation": "swiglu", "candidate_tokens": 32},
    }
    (source / "config.json").write_text(json.dumps(config))

    headless = write_headless(source, tmp_path / "headless")

    written = load_file(headless / "model.safetensors")
    assert set(written) == {"norm.weight", "layers.0.mlp.up_proj.weight"}
    for name, weight in written.items():
        assert weight.dtype == weights[f"model.{name}"].dtype
        assert torch.equal(weight, weights[f"model.{name}"])
    assert json.loads((headless / "config.json").read_text()) == {
        "architectures": ["DFlashDraftModel"],
        "block_size": 8,
        "dflash_config": {"mask_token_id": 5},
    }
    assert json.loads((source / "config.json").read_text()) == config


def test_headless_checkpoint_needs_safetensors(tmp_path) -> None:
    with pytest.raises(FileNotFoundError, match="no safetensors weights"):
        write_headless(tmp_path, tmp_path / "headless")


def _configurations(modes: list[str], budgets: list[int]):
    return build_configurations(
        modes,
        budgets,
        draft="with-head",
        headless_draft="without-head",
        block_size=8,
        tree_options={"treeflash_top_m": 4},
    )


def test_configurations() -> None:
    built = _configurations(["tree", "plain", "dflash", "chain", "marginal"], [64, 16])
    assert [(c.name, c.budget) for c in built] == [
        ("plain", 1),
        ("dflash", 8),
        ("chain", 8),
        ("marginal 16", 16),
        ("marginal 64", 64),
        ("tree 16", 16),
        ("tree 64", 64),
    ]
    by_name = {c.name: c.speculative_config for c in built}
    assert by_name["plain"] is None
    assert by_name["dflash"] == {
        "method": "dflash",
        "model": "without-head",
        "num_speculative_tokens": 7,
    }
    tree = {"method": "treeflash", "treeflash_top_m": 4}
    assert by_name["chain"] == tree | {
        "model": "with-head",
        "num_speculative_tokens": 7,
        "treeflash_mode": "chain",
    }
    assert by_name["marginal 16"] == tree | {
        "model": "without-head",
        "num_speculative_tokens": 15,
        "treeflash_mode": "tree",
    }
    assert by_name["tree 64"] == tree | {
        "model": "with-head",
        "num_speculative_tokens": 63,
        "treeflash_mode": "tree",
    }


@pytest.mark.parametrize(
    ("modes", "budgets", "message"),
    [(["tre"], [16], "unknown mode tre; choose from plain"), (["tree"], [1], "at least 2")],
)
def test_configurations_refuse(modes: list[str], budgets: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _configurations(modes, budgets)


@pytest.mark.parametrize(
    ("modes", "resident", "expected"),
    [
        (
            ["plain", "chain", "tree"],
            3,
            [["plain", "chain", "tree 2"], ["plain", "tree 4", "tree 8"]],
        ),
        (["plain", "chain", "tree"], 9, [["plain", "chain", "tree 2", "tree 4", "tree 8"]]),
        (["tree"], 2, [["tree 2", "tree 4"], ["tree 8"]]),
        (["plain"], 2, [["plain"]]),
    ],
)
def test_groups_hold_plain_and_few_others(modes, resident, expected) -> None:
    groups = in_groups(_configurations(modes, [2, 4, 8]), resident)
    assert [[c.name for c in group] for group in groups] == expected


def test_prompts_from_the_package_and_from_a_file(tmp_path) -> None:
    shipped = load_prompts(["gsm8k", "mbpp"], 2)
    assert [(p.prompt_set, p.index) for p in shipped] == [
        ("gsm8k", 0),
        ("gsm8k", 1),
        ("mbpp", 0),
        ("mbpp", 1),
    ]
    assert len({p.text for p in shipped}) == 4
    file = tmp_path / "own.json"
    file.write_text(json.dumps({"own": ["one", "two"]}))
    assert [p.text for p in load_prompts([str(file)], 5)] == ["one", "two"]
    with pytest.raises(ValueError, match="unknown prompt set nope; shipped are gsm8k"):
        load_prompts(["nope"], 1)


def test_rendered_table_is_aligned() -> None:
    header, rows = ["", "tau"], [["plain", "–"], ["tree 16", "2.819"]]
    assert table.render(header, rows, markdown=False).splitlines() == [
        "           tau",
        "-------  -----",
        "plain        –",
        "tree 16  2.819",
    ]
    assert table.render(header, rows, markdown=True).splitlines() == [
        "|         |   tau |",
        "|---------|------:|",
        "| plain   |     – |",
        "| tree 16 | 2.819 |",
    ]


def test_cells() -> None:
    assert table.number(2.81949, 3) == "2.819"
    assert table.percent(0.846) == "85 %"
    assert table.milliseconds(0.01234) == "12.3"
    assert table.number(None) == table.percent(None) == table.milliseconds(None) == "–"


def test_report_shows_every_configuration() -> None:
    figures = {
        ("plain", 1): measure.summarise(_PLAIN, _PLAIN, compare_tokens=True),
        ("tree 16", 1): measure.summarise(_TREE, _PLAIN, compare_tokens=True),
    }
    speed, step, by_set, depths = table.report(figures).split("\n\n")
    # block efficiency, tokens/s, ratio, decode tokens/s, ratio, bound, share of it, equal
    row = "tree 16 3.500 4.3 1.33 11.0 2.20 13.1 84 % no (1)"
    assert speed.splitlines()[-1].split() == row.split()
    assert speed.splitlines()[-2].split()[-1] == "yes"
    assert step.splitlines()[-1].split()[:6] == ["tree", "16", "200.0", "120.0", "48.0", "2.200"]
    assert by_set.splitlines()[-1].split() == ["tree", "16", "2.000", "8.000", "3.500"]
    assert "plain" not in by_set
    assert depths.splitlines()[-1].split()[2:6] == ["75", "%", "50", "%"]
    slow = {("tree 16", 8): measure.summarise(_PLAIN, _TREE, compare_tokens=False)}
    assert table.report(slow).endswith("\n\nSlower than plain vLLM here: tree 16 (batch 8).")
    assert table.report(figures, markdown=True).startswith("### Speed, batch 1\n\n| ")


class _Runner:
    """Stands in for a model runner on a clock of its own."""

    def __init__(self, clock: list[float]) -> None:
        self.clock = clock

    def execute_model(self, scheduler_output) -> None:
        if scheduler_output.num_scheduled_tokens:
            self.clock[0] += 1.0  # input preparation
            self._model_forward()
            self.clock[0] += 2.0  # logits

    def _model_forward(self) -> None:
        self.clock[0] += 5.0

    def sample_tokens(self) -> None:
        self.clock[0] += 4.0


def test_recorded_steps_run_from_start_to_start(monkeypatch) -> None:
    clock = [100.0]
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    recorder = StepRecorder()
    recorder.model_runner = _Runner(clock)

    def step(tokens: dict[str, int], drafts: dict[str, list[int]], new: list[str]) -> None:
        recorder.model_runner.execute_model(
            SimpleNamespace(
                num_scheduled_tokens=tokens,
                scheduled_spec_decode_tokens=drafts,
                scheduled_new_reqs=new,
            )
        )
        if tokens:
            recorder.model_runner.sample_tokens()
        clock[0] += 10.0  # scheduler, messages

    step({"x": 4}, {}, ["x"])  # before the start: runs, is not recorded
    for _ in range(2):  # a second recording starts afresh
        recorder.start_step_recording()
        step({"a": 7, "b": 3}, {}, ["a", "b"])
        step({"a": 4, "b": 1}, {"a": [5, 6, 7]}, [])
        step({"a": 9, "b": 1}, {"a": [5, 6, 7]}, [])  # more rows than drafts: a prompt's chunk
        step({"b": 1}, {}, [])
        step({}, {}, [])  # only tells of finished requests
        steps = [Step(**recorded) for recorded in recorder.stop_step_recording()]
        assert [(s.requests, s.prefill) for s in steps] == [
            (2, True),
            (2, False),
            (2, True),
            (1, False),
        ]
        # 1 + 5 + 2 for the model, 4 to sample, 10 until the next step but for the last one.
        assert [s.seconds for s in steps] == [22.0, 22.0, 22.0, 12.0]
        assert [s.phases for s in steps] == [{"verify": 7.0}] * 4


def test_phases_of_the_worker_are_taken_per_step(monkeypatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    timer = SimpleNamespace(seconds={"verify": 0.0, "draft": 0.0})
    recorder = StepRecorder()
    recorder.model_runner = _Runner(clock)
    recorder.model_runner.timer = timer
    recorder.start_step_recording()
    for seconds in (3.0, 0.5):
        recorder.model_runner.execute_model(
            SimpleNamespace(
                num_scheduled_tokens={"a": 1},
                scheduled_spec_decode_tokens={},
                scheduled_new_reqs=[],
            )
        )
        timer.seconds["draft"] += seconds
        timer.seconds["verify"] += 100.0  # not used: the recorder times every forward itself
        recorder.model_runner.sample_tokens()
    steps = recorder.stop_step_recording()
    assert [step["phases"] for step in steps] == [
        {"verify": 7.0, "draft": 3.0},
        {"verify": 7.0, "draft": 0.5},
    ]


def test_options() -> None:
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    defaults = parser.parse_args([])
    assert defaults.budgets == [16, 64]
    assert defaults.batch_sizes == [1, 8]
    assert (defaults.num_prompts, defaults.max_tokens, defaults.temperature) == (3, 96, 0.0)
    given = parser.parse_args(["--modes", "plain, tree", "--budgets", "32"])
    assert (given.modes, given.budgets) == (["plain", "tree"], [32])
    for wrong in (["--budgets", "x"], ["--batch-sizes", "0"], ["--resident", "1"]):
        with pytest.raises(SystemExit):
            parser.parse_args(wrong)


def test_a_target_needs_its_drafter() -> None:
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    with pytest.raises(SystemExit, match="--model needs --draft"):
        cli.run(parser.parse_args(["--model", "some/target"]))
