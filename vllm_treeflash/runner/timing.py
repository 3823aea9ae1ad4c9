"""Where the time of a step goes, for the benchmark. Off unless asked for."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

#: verify: target forward and logits · sample: the sampler · commit: walk, compaction,
#: feature rows · draft: context K/V and block forward · tables: stage 1 and 2 · select:
#: tree selection. A nested phase is not counted in the outer one.
PHASES = ("verify", "sample", "commit", "draft", "tables", "select")


class StepTimer:
    """Sums the wall time of the phases over the steps that verified a tree.

    On CPU the operators are synchronous, so wall time is the work's own.
    """

    def __init__(self) -> None:
        self.enabled = False
        self.reset()

    def reset(self) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.steps = 0
        self._nested = 0.0

    def start(self) -> None:
        self.reset()
        self.enabled = True

    def stop(self) -> dict[str, float]:
        """Seconds by phase and the number of verified ``steps``; timing ends."""
        self.enabled = False
        return {**self.seconds, "steps": self.steps}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        if not self.enabled:
            yield
            return
        outer, self._nested = self._nested, 0.0
        start = time.perf_counter()
        try:
            yield
        finally:
            elapsed = time.perf_counter() - start
            self.seconds[name] += elapsed - self._nested
            self._nested = outer + elapsed
