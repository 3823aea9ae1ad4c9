"""Fixtures of the engine tests: tiny models, plain references, counted acceptance."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.engine import tiny_models


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """``models(name)``: path of a tiny target, or of ``drafter`` / ``dflash_drafter``."""
    folder: Path = tmp_path_factory.mktemp("models")
    made: dict[str, str] = {}

    def get(name: str) -> str:
        if name not in made:
            if name in tiny_models.TARGETS:
                made[name] = tiny_models.make_target(name, folder)
            else:
                made[name] = tiny_models.make_drafter(folder, ar_head=name == "drafter")
        return made[name]

    return get


class AcceptanceLog:
    """Acceptance lengths of every tree that was verified since :meth:`clear`."""

    def __init__(self) -> None:
        self.lengths: list[int] = []
        self.batch_sizes: list[int] = []

    def clear(self) -> None:
        self.lengths.clear()
        self.batch_sizes.clear()

    @property
    def mean(self) -> float:
        """Block efficiency; 0 when nothing was verified, which no test may accept."""
        return sum(self.lengths) / len(self.lengths) if self.lengths else 0.0


@pytest.fixture
def acceptance(monkeypatch: pytest.MonkeyPatch) -> Iterator[AcceptanceLog]:
    """Watch the walk of in-process engines."""
    from vllm_treeflash.runner import v1

    log = AcceptanceLog()
    walk = v1.accept

    def watched(layout, sampled):  # type: ignore[no-untyped-def]
        paths = walk(layout, sampled)
        log.lengths += paths.lengths.tolist()
        log.batch_sizes.append(len(paths.lengths))
        return paths

    monkeypatch.setattr(v1, "accept", watched)
    yield log


def random_prompts(lengths: list[int], vocab: int, seed: int = 0) -> list[list[int]]:
    """Prompts of random ordinary tokens (ids 3 and up)."""
    rng = random.Random(seed)
    return [[rng.randrange(3, vocab) for _ in range(length)] for length in lengths]
