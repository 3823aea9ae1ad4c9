"""Options that depend on the path: exact, because such a request decodes plainly."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.conftest import random_prompts
from tests.engines import make_llm, runner_of, speculative_config

VOCAB = 512
PROMPTS = random_prompts([9, 30, 12, 40, 33, 5], VOCAB)
#: Every option next to undisturbed neighbours; "min_tokens" bans a token the greedy run emits.
OPTIONS: dict[str, dict[str, Any]] = {
    "presence_penalty": {"presence_penalty": 1.5},
    "frequency_penalty": {"frequency_penalty": 1.5},
    "repetition_penalty": {"repetition_penalty": 2.0},
    "logit_bias": {"logit_bias": {77: 30.0}},
    "allowed_token_ids": {"allowed_token_ids": [3, 4, 5, 6, 7, 8, 9, 10]},
    "min_tokens": {"min_tokens": 10, "stop_token_ids": [230, 14]},
    "logprobs": {"logprobs": 5},
    "all_logprobs": {"logprobs": -1},
    "logprob_token_ids": {"logprob_token_ids": [5, 6, 7]},
    "prompt_logprobs": {"prompt_logprobs": 3},
    "penalties_sampled": {"repetition_penalty": 1.3, "temperature": 1.0, "seed": 3},
}


def _run(spec: dict[str, Any] | None, options: dict[str, Any]) -> list[Any]:
    """The option on requests 1 and 4 of six; request 2 samples with a seed."""
    from vllm import SamplingParams

    base = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True, "detokenize": False}
    per_request: list[dict[str, Any]] = [{} for _ in PROMPTS]
    per_request[1] = per_request[4] = options
    per_request[2] = {"temperature": 1.0, "seed": 5, "top_p": 0.9}
    params = [SamplingParams(**{**base, **extra}) for extra in per_request]
    with make_llm(speculative_config=spec, max_logprobs=-1) as llm:
        return llm.generate([{"prompt_token_ids": p} for p in PROMPTS], params, use_tqdm=False)


@pytest.mark.parametrize("option", sorted(OPTIONS))
def test_same_as_plain(option: str, acceptance: Any) -> None:
    plain = _run(None, OPTIONS[option])
    tree = _run(speculative_config(num_speculative_tokens=31), OPTIONS[option])
    assert acceptance.mean > 1.0  # the neighbours kept their drafts
    for expected, got in zip(plain, tree):
        of_plain, of_tree = expected.outputs[0], got.outputs[0]
        assert list(of_tree.token_ids) == list(of_plain.token_ids)
        assert of_tree.finish_reason == of_plain.finish_reason
        assert of_tree.stop_reason == of_plain.stop_reason
        _assert_logprobs(of_tree.logprobs, of_plain.logprobs)
        _assert_logprobs(got.prompt_logprobs, expected.prompt_logprobs)


def _assert_logprobs(got: Any, expected: Any) -> None:
    """Same tokens and ranks; values to float32 accuracy (GEMM shapes differ by batch)."""
    assert (got is None) == (expected is None)
    for of_got, of_expected in zip(got or [], expected or []):
        assert (of_got is None) == (of_expected is None)
        if of_got is None:
            continue
        assert of_got.keys() == of_expected.keys()
        for token, logprob in of_got.items():
            assert logprob.logprob == pytest.approx(of_expected[token].logprob, abs=1e-3)


def test_min_tokens_is_drafted_for_once_it_is_met(acceptance: Any) -> None:
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=0, max_tokens=40, min_tokens=12, ignore_eos=True, detokenize=False
    )
    with make_llm(speculative_config=speculative_config(num_speculative_tokens=31)) as llm:
        llm.generate({"prompt_token_ids": [366, 481, 177, 64, 362]}, params, use_tqdm=False)
    assert 0 < sum(acceptance.lengths) <= 40 - 11


def test_log_names_the_option(monkeypatch: Any) -> None:
    from vllm_treeflash.runner import eligibility

    # "Once" is vLLM's info_once, which remembers across engines: watch the calls instead.
    said: list[str] = []
    monkeypatch.setattr(
        eligibility.logger, "info_once", lambda message, *args: said.append(message % args)
    )
    _run(speculative_config(num_speculative_tokens=15), {"repetition_penalty": 2.0})
    assert set(said) == {
        "treeflash: requests with 'repetition_penalty' are decoded without drafts "
        "(their outputs are exact)."
    }


def test_custom_logits_processor(acceptance: Any) -> None:
    """With a custom processor loaded nobody is drafted for, and it is applied exactly."""
    outputs = {}
    for name, spec in (("plain", None), ("tree", speculative_config(num_speculative_tokens=15))):
        with make_llm(
            speculative_config=spec,
            logits_processors=["tests.engine.processors:BanEvenTokens"],
        ) as llm:
            loaded = [type(p).__name__ for p in runner_of(llm).input_batch.logitsprocs.all]
            assert "BanEvenTokens" in loaded
            from tests.engines import greedy

            outputs[name] = greedy(llm, PROMPTS, max_tokens=16)
    assert outputs["tree"] == outputs["plain"]
    assert all(token % 2 for tokens in outputs["tree"] for token in tokens)
    assert acceptance.lengths == []
