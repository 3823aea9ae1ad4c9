"""One vLLM engine of the run, and how a batch is run on it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from vllm import LLM, SamplingParams

from vllm_treeflash.bench.configurations import Configuration
from vllm_treeflash.bench.measure import Batch, Request, Step
from vllm_treeflash.bench.prompts import Prompt
from vllm_treeflash.bench.worker import EXTENSION

#: vLLM's processes poll their message queue for a second after the last message before they
#: sleep (``SpinCondition.busy_loop_s``), one core each. The next engine starts after that;
#: from then on an idle engine uses next to no CPU and several can live side by side.
SETTLE_SECONDS = 1.2


class Engine:
    """A vLLM engine set up for one configuration."""

    def __init__(self, configuration: Configuration, model: str, options: dict[str, Any]) -> None:
        """Start it.

        Args:
            configuration: what it runs.
            model: the target.
            options: further arguments of ``LLM``, the same for every configuration.
        """
        self.configuration = configuration
        if configuration.speculative_config is not None:
            # Per request rather than from Prometheus, whose registry holds only the newest
            # engine of a process. The scheduler feeds both with the same counts.
            options = {**options, "per_request_spec_decode_metrics": "detailed"}
        self.llm = LLM(
            model,
            speculative_config=configuration.speculative_config,
            worker_extension_cls=EXTENSION,
            # A prompt's second run must cost what its first did.
            enable_prefix_caching=False,
            **options,
        )

    def run(
        self,
        prompts: Sequence[Prompt],
        token_ids: Sequence[list[int]],
        sampling: SamplingParams,
        *,
        batch_size: int,
        repeat: int,
        group: int,
    ) -> Batch:
        """Run prompts together and record their steps.

        Args:
            prompts, token_ids: what to run, and the same tokenised.
            sampling: of every request.
            batch_size, repeat, group: labels of the record.
        """
        llm = self.llm
        # Paused while they are queued, so that all prompts are in the first step.
        llm.sleep(level=0)
        llm.enqueue([{"prompt_token_ids": ids} for ids in token_ids], sampling, use_tqdm=False)
        llm.collective_rpc("start_step_recording")
        start = time.perf_counter()
        llm.wake_up(tags=["scheduling"])
        outputs = llm.wait_for_completion(use_tqdm=False)
        seconds = time.perf_counter() - start
        steps = llm.collective_rpc("stop_step_recording")[0]
        time.sleep(SETTLE_SECONDS)
        return Batch(
            configuration=self.configuration.name,
            batch_size=batch_size,
            repeat=repeat,
            group=group,
            seconds=seconds,
            requests=[_request(p, output.outputs[0]) for p, output in zip(prompts, outputs)],
            steps=[Step(**step) for step in steps],
        )

    def threads(self) -> int:
        """CPU threads of its worker."""
        return self.llm.collective_rpc("num_threads")[0]

    def close(self) -> None:
        """End its processes."""
        self.llm.llm_engine.engine_core.shutdown()


def _request(prompt: Prompt, completion: Any) -> Request:
    metrics = completion.spec_decode_metrics
    return Request(
        prompt_set=prompt.prompt_set,
        prompt=prompt.index,
        token_ids=list(completion.token_ids),
        finish_reason=completion.finish_reason,
        accepted=list(metrics.per_step_accepted) if metrics else [],
        drafted=sum(metrics.per_step_drafted) if metrics else 0,
    )
