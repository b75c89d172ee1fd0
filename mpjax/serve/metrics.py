"""An engine's metrics in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Mapping

NUMBERS = {
    "running": ("gauge", "Requests that run."),
    "waiting": ("gauge", "Requests that wait."),
    "pages": ("gauge", "Pages of the cache."),
    "free_pages": ("gauge", "Pages that can be given to requests."),
    "kept_pages": ("gauge", "Pages that are kept for their content alone."),
    "prompt_tokens": ("counter", "Tokens of prompts, read or shared."),
    "shared_tokens": ("counter", "Tokens of prompts that were in the cache."),
    "new_tokens": ("counter", "Tokens that were generated."),
    "proposed_tokens": ("counter", "Tokens that speculation proposed."),
    "accepted_tokens": ("counter", "Proposed tokens that the model accepted."),
    "preemptions": ("counter", "How often a request gave up its pages."),
    "steps": ("counter", "Steps of the engine."),
    "late_steps": ("counter", "Steps before which the device had nothing to do."),
    "work_seconds": ("counter", "Seconds in which there were requests."),
    "idle_seconds": ("counter", "Of them, those in which the device had nothing to do, at most."),
    "programs": ("gauge", "Programs that were compiled."),
}


def exposition(statistics: Mapping[str, float]) -> str:
    """The lines of all metrics, each with its kind and meaning."""
    lines = []
    for name, (kind, meaning) in NUMBERS.items():
        full = f"mpjax_{name}" + ("_total" if kind == "counter" else "")
        lines += [
            f"# HELP {full} {meaning}",
            f"# TYPE {full} {kind}",
            f"{full} {statistics[name]}",
        ]
    return "\n".join(lines) + "\n"
