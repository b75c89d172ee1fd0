"""Token counts of prompts and completions: fixed, random, or from a file."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import numpy as np

from mpjax.arguments import read_text

EXPECTED = "expected 1024, a range such as 512-2048, or lognormal:MEAN:SIGMA:MOST"


@dataclasses.dataclass(frozen=True)
class Lengths:
    """A distribution of positive integers: fixed, uniform or log-normal.

    Fixed: `least` equals `most`. Uniform: from `least` to `most`. Log-normal: with a mean, and with
    sigma, the standard deviation of the logarithm; clipped to `most`.
    """

    least: int
    most: int
    mean: float | None = None
    sigma: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """Parses `1024`, `512-2048` or `lognormal:1024:0.8:4096`. Raises ValueError for others."""
        try:
            if text.startswith("lognormal:"):
                mean, sigma, most = text.removeprefix("lognormal:").split(":")
                found = cls(1, int(most), float(mean), float(sigma))
            else:
                least, _, most = text.partition("-")
                found = cls(int(least), int(most or least))
        except ValueError as error:
            raise ValueError(f"can't read the lengths {text!r}: {EXPECTED}") from error
        is_finite = found.mean is None or 0 < found.mean < math.inf
        is_finite &= 0 <= found.sigma < math.inf
        if not 1 <= found.least <= found.most or not is_finite:
            raise ValueError(f"lengths {text!r} are not positive numbers in order: {EXPECTED}")
        return found

    def __str__(self) -> str:
        """The string that `parse` accepts."""
        if self.mean is not None:
            return f"lognormal:{self.mean:g}:{self.sigma:g}:{self.most}"
        return str(self.most) if self.least == self.most else f"{self.least}-{self.most}"

    def draw(self, count: int, rng: np.random.Generator) -> list[int]:
        """`count` random numbers of the distribution."""
        if self.mean is None:
            return rng.integers(self.least, self.most + 1, count).tolist()
        # The mean of a log-normal distribution is exp(mu + sigma² / 2).
        mu = math.log(self.mean) - self.sigma**2 / 2
        drawn = np.rint(rng.lognormal(mu, self.sigma, count))
        return np.clip(drawn, self.least, self.most).astype(int).tolist()


def read_file(path: Path) -> list[tuple[int, int]]:
    """The token counts (prompt, completion) in a JSON Lines file.

    A line is an object such as {"prompt_tokens": 900, "new_tokens": 120}. Raises ValueError for a
    malformed line, which the message names, and for a file without lines.
    """
    found = []
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            pair = entry["prompt_tokens"], entry["new_tokens"]
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(
                f'{path}, line {number}: expected {{"prompt_tokens": 900, "new_tokens": 120}}'
            ) from error
        if not all(type(size) is int and size >= 1 for size in pair):
            raise ValueError(f"{path}, line {number}: {pair} are not two positive whole numbers")
        found.append(pair)
    if not found:
        raise ValueError(f"{path} has no lines")
    return found
