"""Real vLLM engines inside the test process, one after the other."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm import LLM

#: The recorded reference: a target and a drafter of a few hundred kilobytes.
GOLDEN = Path(__file__).parent / "data" / "golden"
TARGET = str(GOLDEN / "e2e" / "target")
DRAFTER = str(GOLDEN / "e2e" / "drafter")

_DEFAULTS: dict[str, Any] = {
    "model": TARGET,
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 512,
    "max_num_seqs": 8,
    "block_size": 32,
    "skip_tokenizer_init": True,
    "disable_log_stats": True,
}


@contextmanager
def make_llm(**kwargs: Any) -> Iterator[LLM]:
    """A real engine in this process; it is shut down on the way out.

    Args:
        kwargs: of ``vllm.LLM``, over the defaults above.
    """
    from vllm import LLM

    llm = LLM(**{**_DEFAULTS, **kwargs})
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        # The caller may still hold the object: drop the engine, not just the name.
        del llm.llm_engine, llm
        gc.collect()


def speculative_config(**keys: Any) -> dict[str, Any]:
    """``speculative_config`` of the recorded drafter, plus ``keys``."""
    return {"method": "treeflash", "model": DRAFTER, **keys}


def runner_of(llm: LLM) -> Any:
    """The model runner of an in-process engine."""
    core: Any = llm.llm_engine.engine_core
    return core.engine_core.model_executor.driver_worker.worker.model_runner


def greedy(llm: LLM, prompts: Sequence[Sequence[int]], **params: Any) -> list[list[int]]:
    """Greedy continuations of token-id prompts.

    Args:
        params: of ``SamplingParams``, over temperature 0, 32 tokens, ``ignore_eos``.
    """
    from vllm import SamplingParams

    options: dict[str, Any] = {
        "temperature": 0.0,
        "max_tokens": 32,
        "ignore_eos": True,
        "detokenize": False,
        **params,
    }
    outputs = llm.generate(
        [{"prompt_token_ids": list(prompt)} for prompt in prompts],
        SamplingParams(**options),
        use_tqdm=False,
    )
    return [list(output.outputs[0].token_ids) for output in outputs]
