"""Which request options keep a request from being drafted for."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from vllm import SamplingParams
from vllm.sampling_params import (
    RepetitionDetectionParams,
    RequestOutputKind,
    StructuredOutputsParams,
)

from vllm_treeflash.runner import eligibility
from vllm_treeflash.runner.eligibility import path_dependent_option

#: Every option of ``SamplingParams`` with a value that is not its default, and whether the
#: request still gets drafts. Kept apart from the code: an option is allowed here only
#: because of what vLLM documents it to do.
OPTIONS: dict[str, tuple[Any, bool]] = {
    # How a node is sampled from its own logits.
    "temperature": (0.5, True),
    "top_p": (0.5, True),
    "top_k": (7, True),
    "min_p": (0.1, True),
    "seed": (3, True),
    # How many sequences there are, and when one ends (vLLM checks token by token).
    "n": (2, True),
    "stop": (["x"], True),
    "stop_token_ids": ([5], True),
    "ignore_eos": (True, True),
    "max_tokens": (99, True),
    "min_tokens": (4, True),  # the runner waits for them
    "repetition_detection": (
        RepetitionDetectionParams(max_pattern_size=4, min_pattern_size=1, min_count=2),
        True,
    ),
    # About the prompt, or about the form of the answer.
    "prompt_logprobs": (1, True),
    "prompt_logprob_token_ids": ([3], True),
    "prompt_logprob_start": (1, True),
    "flat_logprobs": (True, True),
    "detokenize": (False, True),
    "skip_special_tokens": (False, True),
    "spaces_between_special_tokens": (False, True),
    "include_stop_str_in_output": (True, True),
    "output_kind": (RequestOutputKind.DELTA, True),
    "stream_interval": (4, True),
    "skip_clone": (True, True),
    "output_text_buffer_length": (3, True),
    "skip_reading_prefix_cache": (True, True),
    "extra_args": ({"a": 1}, True),
    "watermarking": (False, True),
    # What depends on the tokens before a node, or is reported for every token.
    "presence_penalty": (0.5, False),
    "frequency_penalty": (0.5, False),
    "repetition_penalty": (1.5, False),
    "logprobs": (0, False),
    "logprob_token_ids": ([4], False),
    "logit_bias": ({4: 1.0}, False),
    "allowed_token_ids": ([4, 5], False),
    "bad_words": (["x"], False),
    "structured_outputs": (StructuredOutputsParams(regex="a+"), False),
    "thinking_token_budget": (10, False),
    "routed_experts_prompt_start": (3, False),
    "trace_decode_token_ids": ([5, 6], False),
}


def test_the_table_names_every_option() -> None:
    options = {name for name in SamplingParams.__struct_fields__ if not name.startswith("_")}
    assert set(OPTIONS) == options


def test_plain_requests_are_drafted_for() -> None:
    assert path_dependent_option(SamplingParams()) is None
    assert path_dependent_option(SamplingParams(temperature=0.0, max_tokens=5)) is None


@pytest.mark.parametrize("option", OPTIONS)
def test_option(option: str) -> None:
    value, drafted = OPTIONS[option]
    params = SamplingParams()
    assert getattr(params, option) != value
    # Set on the finished object: what counts is the value, not how it was validated.
    setattr(params, option, value)
    assert path_dependent_option(params) == (None if drafted else option)


@pytest.mark.parametrize("option", [name for name, (_, drafted) in OPTIONS.items() if not drafted])
def test_an_option_set_to_nothing_is_not_set(option: str) -> None:
    params = SamplingParams()
    for value in (None, [], {}):
        setattr(params, option, value)
        assert path_dependent_option(params) is None


def test_an_option_of_a_later_vllm_counts_as_path_dependent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class LaterParams(SamplingParams):
        new_feature: int | None = None

    assert "new_feature" in LaterParams.__struct_fields__
    params = msgspec.convert({}, LaterParams)
    monkeypatch.setattr(eligibility, "_DEFAULTS", params)
    with_feature = msgspec.convert({"new_feature": 2}, LaterParams)
    assert path_dependent_option(params) is None
    assert path_dependent_option(with_feature) == "new_feature"
