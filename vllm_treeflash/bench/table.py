"""The tables of a run: aligned text for the screen, or Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vllm_treeflash.bench.measure import SHARES, Figures

_ABSENT = "–"


def render(header: Sequence[str], rows: Sequence[Sequence[str]], *, markdown: bool) -> str:
    """A table, first column left-aligned, the others right-aligned.

    Args:
        header: titles of the columns.
        rows: cells, as many as titles.
        markdown: GitHub's pipes instead of spaces.
    """
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(cells, widths))
        ]
        return f"| {' | '.join(padded)} |" if markdown else "  ".join(padded).rstrip()

    if markdown:
        rule = (
            "|"
            + "|".join(
                "-" * (width + 2) if i == 0 else "-" * (width + 1) + ":"
                for i, width in enumerate(widths)
            )
            + "|"
        )
    else:
        rule = "  ".join("-" * width for width in widths)
    return "\n".join([line(header), rule, *(line(row) for row in rows)])


def number(value: float | None, digits: int = 2) -> str:
    """Fixed point, or a dash."""
    return _ABSENT if value is None else f"{value:.{digits}f}"


def percent(value: float | None) -> str:
    """A fraction in per cent, or a dash."""
    return _ABSENT if value is None else f"{100 * value:.0f} %"


def milliseconds(value: float | None) -> str:
    """Seconds in milliseconds, or a dash."""
    return _ABSENT if value is None else f"{1000 * value:.1f}"


def report(figures: Mapping[tuple[str, int], Figures], *, markdown: bool = False) -> str:
    """All tables of a run.

    Args:
        figures: by configuration and batch size, in the order to show.
        markdown: GitHub's tables instead of aligned text.
    """
    parts = []
    for batch_size in dict.fromkeys(size for _, size in figures):
        of_size = {name: f for (name, size), f in figures.items() if size == batch_size}
        for title, table in (
            (f"Speed, batch {batch_size}", _speed),
            (f"Step, batch {batch_size} (ms a decode step; share of its time)", _step),
            (f"Block efficiency, batch {batch_size}", _by_set),
            (f"Accepted paths that reach a depth, batch {batch_size}", _depths),
        ):
            header, rows = table(of_size)
            if rows:
                heading = f"### {title}\n" if markdown else title
                parts.append(f"{heading}\n{render(header, rows, markdown=markdown)}")
    slower = [
        f"{name} (batch {size})"
        for (name, size), f in figures.items()
        if f.ratio_to_plain is not None and f.ratio_to_plain < 1
    ]
    if slower:
        parts.append(f"Slower than plain vLLM here: {', '.join(slower)}.")
    return "\n\n".join(parts)


_Table = tuple[list[str], list[list[str]]]


def _speed(figures: Mapping[str, Figures]) -> _Table:
    header = ["", "block eff.", "tokens/s", "vs plain", "decode tok/s", "vs plain", "bound tok/s"]
    header += ["of bound", "tokens = plain"]
    rows = []
    for name, f in figures.items():
        equal = _ABSENT
        if f.different_from_plain is not None:
            equal = "yes" if not f.different_from_plain else f"no ({f.different_from_plain})"
        rows.append(
            [
                name,
                number(f.block_efficiency, 3),
                number(f.tokens_per_second, 1),
                number(f.ratio_to_plain),
                number(f.decode_tokens_per_second, 1),
                number(f.decode_ratio_to_plain),
                number(f.bound_tokens_per_second, 1),
                percent(f.share_of_bound),
                equal,
            ]
        )
    return header, rows


def _step(figures: Mapping[str, Figures]) -> _Table:
    header = ["", "step", "t_v", "t_d", "tokens/forward", *SHARES, "overhead"]
    return header, [
        [
            name,
            milliseconds(f.step_seconds),
            milliseconds(f.verify_seconds),
            milliseconds(f.draft_seconds),
            number(f.tokens_per_forward, 3),
            *(percent(f.shares.get(share)) for share in SHARES),
            percent(f.overhead_share),
        ]
        for name, f in figures.items()
    ]


def _by_set(figures: Mapping[str, Figures]) -> _Table:
    drafting = {name: f for name, f in figures.items() if f.block_efficiency is not None}
    sets = list(dict.fromkeys(s for f in drafting.values() for s in f.block_efficiency_by_set))
    return ["", *sets, "all"], [
        [
            name,
            *(number(f.block_efficiency_by_set.get(s), 3) for s in sets),
            number(f.block_efficiency, 3),
        ]
        for name, f in drafting.items()
    ]


def _depths(figures: Mapping[str, Figures]) -> _Table:
    drafting = {name: f for name, f in figures.items() if f.accepted_per_depth}
    depth = max((len(f.accepted_per_depth) for f in drafting.values()), default=0)
    return ["depth", *(str(d + 1) for d in range(depth))], [
        [
            name,
            *(percent(share) for share in f.accepted_per_depth),
            *["0 %"] * (depth - len(f.accepted_per_depth)),
        ]
        for name, f in drafting.items()
    ]
