"""Options that need a tokenizer, on the SmolLM2 pair: structured outputs, words, strings."""

from __future__ import annotations

from typing import Any

from tests.engines import make_llm
from vllm_treeflash.smollm2 import drafter_path, target_path

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
QUESTION = "Count from one to twenty in words."


def _params() -> dict[str, Any]:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    base = {"temperature": 0.0, "max_tokens": 20}
    return {
        "undisturbed": SamplingParams(**base),
        "json": SamplingParams(**base, structured_outputs=StructuredOutputsParams(json=SCHEMA)),
        "regex": SamplingParams(
            **base, structured_outputs=StructuredOutputsParams(regex="[a-f]{6,12}")
        ),
        "choice": SamplingParams(
            **base, structured_outputs=StructuredOutputsParams(choice=["seven", "eleven"])
        ),
        "bad_words": SamplingParams(**base, bad_words=["two", " two", "three"]),
        # Spans tokens; the text must end in front of it, or behind it.
        "stop": SamplingParams(**base, stop=["wo\n3", "wo, th"]),
        "stop_included": SamplingParams(
            **base, stop=["wo\n3", "wo, th", "ee"], include_stop_str_in_output=True
        ),
    }


def test_same_text_as_plain_in_one_batch(acceptance: Any) -> None:
    spec = {"method": "treeflash", "model": str(drafter_path()), "num_speculative_tokens": 15}
    answers = {}
    for name, speculative in (("plain", None), ("tree", spec)):
        with make_llm(
            model=str(target_path()), skip_tokenizer_init=False, speculative_config=speculative
        ) as llm:
            params = _params()
            chats = [[{"role": "user", "content": QUESTION}]] * len(params)
            outputs = llm.chat(chats, list(params.values()), use_tqdm=False)
        answers[name] = {
            option: (o.outputs[0].text, list(o.outputs[0].token_ids), o.outputs[0].finish_reason)
            for option, o in zip(params, outputs)
        }
    assert answers["tree"] == answers["plain"]
    assert answers["tree"]["choice"][0] in ("seven", "eleven")
    # The undisturbed request and those with stop strings were drafted for, well.
    assert acceptance.mean > 1.1
