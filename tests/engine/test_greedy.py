"""Greedy float32 output equals plain vLLM, token for token, however trees are verified."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine import tiny_models
from tests.engine.conftest import random_prompts
from tests.engines import greedy, make_llm, runner_of, speculative_config

#: Shorter, equal to and longer than a block of 32, with multiples that leave no room.
LENGTHS = [3, 31, 32, 33, 64, 90, 7, 150, 40, 12]
GOLDEN_VOCAB = 512


@pytest.fixture(scope="module")
def golden_plain() -> list[list[int]]:
    """Plain greedy continuations of the recorded target."""
    with make_llm() as llm:
        return greedy(llm, random_prompts(LENGTHS, GOLDEN_VOCAB), max_tokens=48)


@pytest.mark.parametrize("nodes", [1, 2, 15, 63, 128])
def test_every_budget_in_a_batch(
    nodes: int, golden_plain: list[list[int]], acceptance: Any
) -> None:
    prompts = random_prompts(LENGTHS, GOLDEN_VOCAB)
    spec = speculative_config(num_speculative_tokens=nodes)
    with make_llm(speculative_config=spec) as llm:
        assert greedy(llm, prompts, max_tokens=48) == golden_plain
        assert max(acceptance.batch_sizes) == 8  # max_num_seqs trees in one forward
        assert acceptance.mean > 1.0
        assert greedy(llm, prompts[:1], max_tokens=48) == golden_plain[:1]
        assert acceptance.batch_sizes[-1] == 1


@pytest.mark.parametrize("mode", ["chain", "tree"])
def test_chunked_prefill_beside_trees(
    mode: str, golden_plain: list[list[int]], acceptance: Any
) -> None:
    """Prefill chunks, plain decodes and truncated trees share a budget of 48 rows."""
    nodes = 7 if mode == "chain" else 40
    spec = speculative_config(num_speculative_tokens=nodes, treeflash_mode=mode)
    with make_llm(speculative_config=spec, max_num_batched_tokens=48) as llm:
        prompts = random_prompts(LENGTHS, GOLDEN_VOCAB)
        assert greedy(llm, prompts, max_tokens=48) == golden_plain
    assert acceptance.mean > 1.0


def test_prefix_cache_hits_draft_as_well_as_a_first_run(
    golden_plain: list[list[int]], acceptance: Any
) -> None:
    prompts = random_prompts(LENGTHS, GOLDEN_VOCAB)
    with make_llm(speculative_config=speculative_config(), disable_log_stats=False) as llm:
        runs, lengths = [], []
        for _ in range(2):
            acceptance.clear()
            runs += [[greedy(llm, [prompt], max_tokens=48)[0] for prompt in prompts]]
            lengths.append(list(acceptance.lengths))
        hits = {m.name: m.value for m in llm.get_metrics() if hasattr(m, "value")}
        # The continuation of a committed run: its blocks hold compacted K/V.
        grown = [p + t[:40] for p, t in zip(prompts, golden_plain)]
        rest = greedy(llm, grown, max_tokens=8)
    assert runs == [golden_plain, golden_plain]
    # Full blocks of the second run came from the cache, and the drafter saw no difference.
    full_blocks = sum((len(prompt) - 1) // 32 * 32 for prompt in prompts)
    assert hits["vllm:prefix_cache_hits"] >= full_blocks > 0
    assert lengths[0] == lengths[1]
    assert rest == [tokens[40:] for tokens in golden_plain]


def test_context_of_a_chunked_prefill_is_complete(
    golden_plain: list[list[int]], acceptance: Any
) -> None:
    """The drafter accepts the same, step by step, whether a prompt came whole or in chunks."""
    prompt = random_prompts(LENGTHS, GOLDEN_VOCAB)[7]
    lengths = []
    for budget in (4096, 48):
        acceptance.clear()
        spec = speculative_config(num_speculative_tokens=31)
        with make_llm(speculative_config=spec, max_num_batched_tokens=budget) as llm:
            assert greedy(llm, [prompt], max_tokens=48) == golden_plain[7:8]
        lengths.append(list(acceptance.lengths))
    assert lengths[0] == lengths[1]


def test_preemption(golden_plain: list[list[int]], acceptance: Any) -> None:
    """A KV pool for about two of eight requests: they are preempted, resumed and right."""
    prompts = random_prompts(LENGTHS, GOLDEN_VOCAB)
    spec = speculative_config(num_speculative_tokens=31)
    with make_llm(
        speculative_config=spec, num_gpu_blocks_override=18, disable_log_stats=False
    ) as llm:
        assert greedy(llm, prompts, max_tokens=48) == golden_plain
        preemptions = {m.name: m.value for m in llm.get_metrics() if hasattr(m, "value")}
    assert preemptions["vllm:num_preemptions"] > 0
    assert acceptance.mean > 1.0


def test_up_to_max_model_len(acceptance: Any) -> None:
    """Prompts of 180 to 255 tokens in a context of 256, with 63 drafts at every step."""
    prompts = random_prompts([180, 199, 220, 240, 247, 250, 254, 255], GOLDEN_VOCAB)
    outputs = {}
    for name, spec in (("plain", None), ("tree", speculative_config())):
        with make_llm(speculative_config=spec, max_model_len=256) as llm:
            outputs[name] = _with_reasons(llm, prompts, max_tokens=200)
    assert outputs["tree"] == outputs["plain"]
    assert [len(p) + len(t) for p, (t, _) in zip(prompts, outputs["tree"])] == [256] * 8
    assert {reason for _, reason in outputs["tree"]} == {"length"}
    assert acceptance.mean > 1.0


def test_drafters_own_limit(golden_plain: list[list[int]], acceptance: Any) -> None:
    """Beyond the drafter's max_model_len requests decode plainly, in the same batch."""
    prompts = random_prompts(LENGTHS, GOLDEN_VOCAB)
    with make_llm(speculative_config=speculative_config(max_model_len=60)) as llm:
        assert greedy(llm, prompts, max_tokens=48) == golden_plain
    assert acceptance.mean > 1.0


def test_stopping_in_mid_path(models: Any, acceptance: Any) -> None:
    """max_tokens and stop tokens end requests inside accepted paths, as without trees."""
    from vllm import SamplingParams

    prompt: Any = {"prompt_token_ids": random_prompts([20], tiny_models.VOCAB)[0]}
    base = {"temperature": 0.0, "detokenize": False, "max_tokens": 48}
    params = [SamplingParams(**{**base, "max_tokens": n}) for n in range(1, 49)]
    params += [
        SamplingParams(**base, stop_token_ids=[token], min_tokens=min_tokens)
        for token in range(tiny_models.VOCAB)
        for min_tokens in (0, 9)
    ]
    spec = {"method": "treeflash", "model": models("drafter"), "num_speculative_tokens": 63}
    ends: dict[str, list[Any]] = {}
    for name, speculative in (("plain", None), ("tree", spec)):
        with make_llm(model=models("qwen3_tied"), speculative_config=speculative) as llm:
            whole = llm.generate(prompt, SamplingParams(**base, ignore_eos=True), use_tqdm=False)
            lengths = list(acceptance.lengths)
            outputs = llm.generate([prompt] * len(params), params, use_tqdm=False)
        ends[name] = [
            (list(o.token_ids), o.finish_reason, o.stop_reason)
            for o in (output.outputs[0] for output in whole + outputs)
        ]
    assert ends["tree"] == ends["plain"]
    assert {reason for _, reason, _ in ends["tree"]} == {"length", "stop"}
    # Where the accepted paths of the undisturbed request ended; token 1 is the prefill's.
    boundaries = {1 + sum(lengths[:i]) for i in range(len(lengths) + 1)}
    for kind, at_least in (("length", 10), ("stop", 1)):
        inside = {len(t) for t, reason, _ in ends["tree"] if reason == kind} - boundaries
        assert len(inside) >= at_least, kind


@pytest.mark.parametrize("target", sorted(tiny_models.TARGETS))
def test_families(target: str, models: Any, acceptance: Any) -> None:
    """Tied and untied, padded vocabularies, biases, sliding windows; tree, chain, marginal."""
    prompts = random_prompts(LENGTHS, tiny_models.VOCAB)
    with make_llm(model=models(target)) as llm:
        plain = greedy(llm, prompts, max_tokens=48)
    specs = {
        "tree": {"model": models("drafter"), "num_speculative_tokens": 63},
        "marginal": {"model": models("dflash_drafter"), "num_speculative_tokens": 31},
        "chain": {"model": models("drafter"), "treeflash_mode": "chain"},
    }
    for name, spec in specs.items():
        acceptance.clear()
        with make_llm(
            model=models(target), speculative_config={"method": "treeflash", **spec}
        ) as llm:
            assert greedy(llm, prompts, max_tokens=48) == plain, name
            runner = runner_of(llm)
            drafter, target_model = runner.drafter.model, runner.model
            assert drafter.lm_head is target_model.lm_head  # shared, not copied
            assert drafter.model.embed_tokens is target_model.model.embed_tokens
        # A random drafter is right now and then; that some path was accepted is enough.
        assert max(acceptance.lengths) >= 2, name


def _with_reasons(llm: Any, prompts: list[list[int]], **params: Any) -> list[tuple[list[int], str]]:
    from vllm import SamplingParams

    options = {"temperature": 0.0, "ignore_eos": True, "detokenize": False, **params}
    outputs = llm.generate(
        [{"prompt_token_ids": p} for p in prompts], SamplingParams(**options), use_tqdm=False
    )
    return [(list(o.outputs[0].token_ids), o.outputs[0].finish_reason) for o in outputs]
