"""Tables of comparisons of a model in several precisions with its 16-bit version."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

HEADERS = (
    *("precision", "bits", "perplexity", "Δ", "KL in nats", "median", "99 %", "same top"),
    "weights",
)


def cells(row: Mapping[str, Any]) -> list[str]:
    """The texts of a row, in the order of HEADERS; Δ is the change from the reference."""
    rise = row["perplexity"] / row["reference_perplexity"] - 1
    return [
        row["precision"],
        f"{row['bits_per_weight']:.2f}",
        f"{row['perplexity']:.4f}",
        f"{100 * rise:+.2f} %",
        f"{row['kl_mean']:.5f} ± {row['kl_error']:.5f}",
        f"{row['kl_median']:.5f}",
        f"{row['kl_p99']:.4f}",
        f"{100 * row['same_top']:.2f} %",
        f"{row['weights_bytes'] / 1e6:,.2f} MB",
    ]
