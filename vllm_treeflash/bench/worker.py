"""Times every step inside the engine's worker process.

A class for vLLM's public ``worker_extension_cls``: its methods join the worker's and are
called through ``LLM.collective_rpc``. It works on any worker, so the plain engine, vLLM's own
speculation and TreeFlash are timed by the same clock.
"""

from __future__ import annotations

import functools
import time
from typing import Any

import torch

#: For ``LLM(worker_extension_cls=...)``.
EXTENSION = "vllm_treeflash.bench.worker.StepRecorder"


class StepRecorder:
    """Mixin that records each step of ``self.model_runner``.

    A step's time runs from its ``execute_model`` to the next one, so that a run of steps is
    divided without gaps: model, sampling, drafting, but also vLLM's scheduler, input
    preparation and the messages between its processes. The last step of a recording runs to
    the end of its ``sample_tokens``, where drafting ends too. A call without tokens, which
    vLLM makes to tell of finished requests, is not a step.
    """

    model_runner: Any

    def num_threads(self) -> int:
        """Threads that an operator may use."""
        return torch.get_num_threads()

    def start_step_recording(self) -> None:
        """Record every step from now on."""
        runner = self.model_runner
        if not hasattr(self, "_steps"):
            runner.execute_model = self._recorded(runner.execute_model)
            runner.sample_tokens = self._ended(runner.sample_tokens)
            runner._model_forward = self._timed_forward(runner._model_forward)
        self._steps: list[dict[str, Any]] = []
        self._recording = True
        if hasattr(self, "start_step_timing"):
            self.start_step_timing()

    def stop_step_recording(self) -> list[dict[str, Any]]:
        """The steps since the start, see :class:`vllm_treeflash.bench.measure.Step`."""
        self._recording = False
        if hasattr(self, "stop_step_timing"):
            self.stop_step_timing()
        return [
            {key: step[key] for key in ("seconds", "requests", "prefill", "phases")}
            for step in self._steps
        ]

    def _recorded(self, execute_model: Any) -> Any:
        @functools.wraps(execute_model)
        def wrapper(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            scheduled = scheduler_output.num_scheduled_tokens
            if not self._recording or not scheduled:
                return execute_model(scheduler_output, *args, **kwargs)
            start = time.perf_counter()
            if self._steps:
                self._close_step(start)
            drafts = scheduler_output.scheduled_spec_decode_tokens
            step: dict[str, Any] = {
                "start": start,
                "timed": self._timed_phases(),
                "requests": len(scheduled),
                "prefill": bool(scheduler_output.scheduled_new_reqs)
                or any(n != 1 + len(drafts.get(req_id, ())) for req_id, n in scheduled.items()),
            }
            output = execute_model(scheduler_output, *args, **kwargs)
            # From the target's forward to the end of execute_model: hidden states, logits.
            step["verify"] = time.perf_counter() - self._forward_start
            self._steps.append(step)
            return output

        return wrapper

    def _ended(self, sample_tokens: Any) -> Any:
        @functools.wraps(sample_tokens)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            output = sample_tokens(*args, **kwargs)
            if self._recording and self._steps:
                self._close_step(time.perf_counter())
            return output

        return wrapper

    def _timed_forward(self, forward: Any) -> Any:
        @functools.wraps(forward)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            self._forward_start = time.perf_counter()
            return forward(*args, **kwargs)

        return wrapper

    def _timed_phases(self) -> dict[str, float]:
        """Running totals of the TreeFlash worker's own timer; nothing on other workers."""
        timer = getattr(self.model_runner, "timer", None)
        if timer is None:
            return {}
        # The forward is timed above, the same way on every worker and in every step.
        return {name: s for name, s in timer.seconds.items() if name != "verify"}

    def _close_step(self, now: float) -> None:
        """Set the end of the newest step, for good or until its successor starts."""
        step = self._steps[-1]
        step["seconds"] = now - step["start"]
        step["phases"] = {"verify": step["verify"]} | {
            name: seconds - step["timed"][name] for name, seconds in self._timed_phases().items()
        }
