"""Measures an engine on several loads in a process: python -m benchmarks.serving FOLDER [NAME ...].

Each case is a run of `mpjax bench serve`, which writes serve-NAME.json to the folder as soon as it
has ended. The ratios of all cases that the folder has are written to ratios.json after each. NAME
may also be a group: `short` or `long`. A case takes one to two minutes on an H100, most of which is
compiling.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from mpjax.bench import measure
from mpjax.cli.application import app

# An engine compiles before the first round, so with many prompts one round suffices.
ONCE = ("--rounds", "1")
AT_ONCE = (
    *("--requests", "256", "--prompt-tokens", "1024", "--new-tokens", "512", *ONCE),
    *("--max-gap", "inf"),
)
UNEVEN = (
    *("--requests", "512", "--prompt-tokens", "lognormal:1024:0.8:4096"),
    *("--new-tokens", "lognormal:512:0.8:4096", "--max-gap", "inf", *ONCE),
)
SHARED = (
    *("--requests", "32", "--prompt-tokens", "4096", "--new-tokens", "2"),
    *("--shared-tokens", "3072", "--slots", "32"),
)
LATE = (
    *("--requests", "32", "--prompt-tokens", "1024", "--new-tokens", "500"),
    *("--late-prompt", "32768", "--slots", "64", "--steps", "1"),
)
CASES: dict[str, tuple[str, ...]] = {
    "late_prompt": LATE,
    "shared": SHARED,
    "not_shared": (*SHARED, "--no-share"),
    "alone": (
        *("--requests", "1", "--prompt-tokens", "2048", "--new-tokens", "512", "--static", "1"),
        *("--slots", "1"),
    ),
    "at_once": AT_ONCE,
    "at_once_static": (*AT_ONCE, "--static", "256", "--no-engine"),
    "at_once_default_gap": AT_ONCE[:-2],
    "at_once_8192": (*AT_ONCE, "--chunk-tokens", "8192"),
    "uneven": UNEVEN,
    # Fewer requests, in two batches, as each batch takes half a minute.
    "uneven_static": ("--requests", "128", *UNEVEN[2:], "--static", "64", "--no-engine"),
    "at_once_w4a8": (*AT_ONCE, "--precision", "W4A8KV8"),
    "at_once_w4a8_static": (*AT_ONCE, "--precision", "W4A8KV8", "--static", "128", "--no-engine"),
}
GROUPS = {
    "short": ("late_prompt", "shared", "not_shared", "alone", "at_once", "at_once_8192"),
    "long": ("uneven", "at_once_static", "uneven_static"),
}

Rows = Mapping[str, Sequence[Mapping[str, Any]]]  # case → rows, of the engine or of static batches
RATE = "new_tokens_per_second"


def _over(case: str, other: str, key: str = RATE) -> Callable[[Rows], float]:
    """The ratio of a value between two cases."""
    return lambda rows: rows[case][0][key] / rows[other][0][key]


def _idle(case: str) -> Callable[[Rows], float]:
    return lambda rows: rows[case][0]["idle_share"] * 100


def _gap(case: str) -> Callable[[Rows], float]:
    return lambda rows: rows[case][0]["gap_seconds"]["most"] * 1e3


def _token_speed(rows: Rows) -> float:
    engine, batch = (row["token_seconds"]["mean"] for row in rows["alone"])
    return batch / engine


NUMBERS: dict[str, Callable[[Rows], float]] = {
    "at_once: tokens/s": lambda rows: rows["at_once"][0][RATE],
    "at_once: device idle, % at most": _idle("at_once"),
    "at_once / static batch of 256": _over("at_once", "at_once_static"),
    "at_once_default_gap / at_once": _over("at_once_default_gap", "at_once"),
    "at_once_8192 / at_once": _over("at_once_8192", "at_once"),
    "at_once_w4a8: tokens/s": lambda rows: rows["at_once_w4a8"][0][RATE],
    "at_once_w4a8 / static batches of 128": _over("at_once_w4a8", "at_once_w4a8_static"),
    "uneven / at_once, per token": _over("uneven", "at_once"),
    "uneven: device idle, % at most": _idle("uneven"),
    "uneven / static batches of 64": _over("uneven", "uneven_static"),
    "shared / not_shared, until all first tokens": _over(
        "shared", "not_shared", "all_first_tokens_seconds"
    ),
    "late_prompt: longest gap, ms": _gap("late_prompt"),
    "alone: decoding, engine / generate_tokens": _token_speed,
}


def arguments(name: str, folder: Path) -> list[str]:
    """The command-line arguments of `mpjax` for a case."""
    output = str(folder / f"serve-{name}.json")
    return ["bench", "serve", *CASES[name], "--no-plot", "--output", output]


def numbers(folder: Path) -> dict[str, float]:
    """Name → ratio, for ratios whose cases are all in the folder."""
    rows = {}
    for name in CASES:
        if (path := folder / f"serve-{name}.json").is_file():
            rows[name] = json.loads(path.read_text(encoding="utf-8"))["results"]
    found = {}
    for name, compute in NUMBERS.items():
        try:
            found[name] = compute(rows)
        except (KeyError, IndexError):  # a case that was not run, or only in part
            continue
    return found


def run(name: str, folder: Path) -> bool:
    """Runs a case in this process; returns whether it passed its checks.

    An error, such as a lack of memory, is printed, so that further cases can run.
    """
    begin = time.perf_counter()
    words = arguments(name, folder)
    sys.argv = ["mpjax", *words]  # recorded in results as their command
    try:
        return not app(words, standalone_mode=False)
    except click.exceptions.Exit as end:
        return end.exit_code == 0
    except Exception:
        traceback.print_exc()
        return False
    finally:
        print(f"{name}: {time.perf_counter() - begin:.0f} s", file=sys.stderr)


def main(given: list[str]) -> int:
    """Runs the named cases and groups, or all; returns how many failed, 2 for wrong usage."""
    if not given:
        print((__doc__ or "").partition("\n")[0], file=sys.stderr)
        return 2
    folder, names = Path(given[0]), [one for name in given[1:] for one in GROUPS.get(name, (name,))]
    if unknown := sorted(set(names) - set(CASES)):
        known = ", ".join([*GROUPS, *CASES])
        print(f"there is no case {unknown[0]!r}: expected {known}", file=sys.stderr)
        return 2
    failed = 0
    for name in names or CASES:
        failed += not run(name, folder)
        found = numbers(folder)
        measure.save("ratios", {"results": found}, folder)
    for name, number in found.items():
        print(f"{number:10.3f}  {name}")
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
