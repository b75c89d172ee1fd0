"""The figures in pages of the docs, by name."""

from __future__ import annotations

from benchmarks.figures import compiled, peers, quality, speed, summary, systems
from benchmarks.report import Figures

FIGURES: dict[str, Figures] = {
    **summary.FIGURES,
    **speed.FIGURES,
    **quality.FIGURES,
    **systems.FIGURES,
    **peers.FIGURES,
    **compiled.FIGURES,
}
