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
    preparation and the messages between its processes. The call without tokens that vLLM
    makes when a request has finished closes the last step and is not one itself.
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
            runner._model_forward = self._timed_forward(runner._model_forward)
        self._steps: list[dict[str, Any]] = []
        self._recording = True
        if hasattr(self, "start_step_timing"):
            self.start_step_timing()

    def stop_step_recording(self) -> list[dict[str, Any]]:
        """The steps since the start, see :class:`vllm_treeflash.bench.measure.Step`.

        A last step that nothing has closed is left out: its end is not known.
        """
        self._recording = False
        if hasattr(self, "stop_step_timing"):
            self.stop_step_timing()
        return [
            {key: step[key] for key in ("seconds", "requests", "prefill", "phases")}
            for step in self._steps
            if "seconds" in step
        ]

    def _recorded(self, execute_model: Any) -> Any:
        @functools.wraps(execute_model)
        def wrapper(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._recording:
                return execute_model(scheduler_output, *args, **kwargs)
            start = time.perf_counter()
            timed = self._timed_phases()
            self._close_step(start, timed)
            scheduled = scheduler_output.num_scheduled_tokens
            if not scheduled:
                return execute_model(scheduler_output, *args, **kwargs)
            drafts = scheduler_output.scheduled_spec_decode_tokens
            step: dict[str, Any] = {
                "start": start,
                "timed": timed,
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

    def _close_step(self, now: float, timed: dict[str, float]) -> None:
        if not self._steps or "seconds" in self._steps[-1]:
            return
        step = self._steps[-1]
        step["seconds"] = now - step["start"]
        step["phases"] = {"verify": step["verify"]} | {
            name: seconds - step["timed"][name] for name, seconds in timed.items()
        }
