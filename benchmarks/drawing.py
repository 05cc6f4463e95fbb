"""Loss curves as data, and as a small SVG."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Curves:
    """Loss by step, one list per seed. gap: mean distance to FP32 over steps and seeds."""

    task: str
    format: str
    max_error: float
    islands: int
    fp32: Sequence[Sequence[float]]
    autocast: Sequence[Sequence[float]]
    plan: Sequence[Sequence[float]]

    def gap(self, kind: str, steps: int | None = None) -> float:
        pairs = zip(getattr(self, kind), self.fp32, strict=True)
        return statistics.mean(
            abs(a - b) for ours, theirs in pairs for a, b in list(zip(ours, theirs, strict=True))[:steps]
        )


def drawn(shown: Curves) -> str:
    """The curves as a small SVG: the mean over seeds, and below it the distance to FP32, logarithmic."""
    width, height, left, top = 640, 260, 44, 22
    half = (width - 3 * left) / 2
    kinds = {"fp32": "#6b7280", "autocast": "#d97706", "plan": "#2563eb"}
    labels = {"fp32": "FP32", "autocast": f"{shown.format.upper()} autocast", "plan": f"{shown.format.upper()} plan"}
    means = {kind: _smooth([statistics.mean(s) for s in zip(*getattr(shown, kind), strict=True)]) for kind in kinds}
    gaps = {kind: _smooth(_distances(shown, kind)) for kind in ("autocast", "plan")}
    most = max(max(curve) for curve in means.values())
    exponents = [torch.log10(torch.tensor(g).clamp_min(1e-6)).tolist() for g in gaps.values()]
    low, high = min(map(min, exponents)), max(map(max, exponents))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="{left}" y="14">loss, 0 to {most:.2g}</text>',
        f'<text x="{2 * left + half:.0f}" y="14">distance to FP32, {10**low:.1g} to {10**high:.1g}, logarithmic</text>',
    ]
    bottom = height - 34

    def path(values: Sequence[float], start: float, least: float, greatest: float, color: str) -> str:
        span = (greatest - least) or 1.0
        points = " ".join(
            f"{start + half * i / max(len(values) - 1, 1):.1f},{bottom - (bottom - top) * (v - least) / span:.1f}"
            for i, v in enumerate(values)
        )
        return f'<polyline fill="none" stroke="{color}" stroke-width="1.5" points="{points}"/>'

    parts += [path(curve, left, 0.0, most, kinds[kind]) for kind, curve in means.items()]
    parts += [
        path(values, 2 * left + half, low, high, kinds[kind]) for kind, values in zip(gaps, exponents, strict=True)
    ]
    parts += [
        f'<text x="{left + 130 * i}" y="{height - 10}" fill="{color}">{labels[kind]}</text>'
        for i, (kind, color) in enumerate(kinds.items())
    ]
    parts.append(
        f'<text x="{width - left}" y="{height - 10}" text-anchor="end">{len(shown.plan[0])} steps, mean of '
        f"{len(shown.plan)} seeds</text>"
    )
    return "\n".join([*parts, "</svg>"]) + "\n"


def _distances(shown: Curves, kind: str) -> list[float]:
    pairs = [
        [abs(a - b) for a, b in zip(ours, theirs, strict=True)]
        for ours, theirs in zip(getattr(shown, kind), shown.fp32, strict=True)
    ]
    return [statistics.mean(step) for step in zip(*pairs, strict=True)]


def _smooth(values: Sequence[float], width: int = 10) -> list[float]:
    return [statistics.mean(values[max(0, i - width + 1) : i + 1]) for i in range(len(values))]
