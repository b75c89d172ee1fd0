"""SpeculationReport: counts of speculative decoding, as `generate` returns them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class SpeculationReport:
    """Counts of speculative decoding; lists have an entry for each prompt.

    proposed, accepted: numbers of proposed and of accepted tokens.
    steps: steps of the model in which the row got at least one token.
    tokens: new tokens of these steps: all but each row's first. If a row ends at a stop string,
        they include tokens generated after it, before the host saw it.
    """

    proposed: list[int]
    accepted: list[int]
    steps: list[int]
    tokens: list[int]

    def __add__(self, other: SpeculationReport) -> SpeculationReport:
        """The sum of two reports on the same prompts."""
        pairs = zip(self._lists, other._lists, strict=True)
        sums = ([old + new for old, new in zip(*lists, strict=True)] for lists in pairs)
        return SpeculationReport(*sums)

    @classmethod
    def join(cls, reports: Sequence[SpeculationReport | None]) -> SpeculationReport | None:
        """Joins the reports of several prompts; None counts as a report of zeros.

        Returns None if all are None.
        """
        if all(report is None for report in reports):
            return None
        each = [cls([0], [0], [0], [0]) if one is None else one for one in reports]
        lists = zip(*(one._lists for one in each), strict=True)
        return cls(*(list(itertools.chain(*parts)) for parts in lists))

    @property
    def _lists(self) -> tuple[list[int], ...]:
        return self.proposed, self.accepted, self.steps, self.tokens

    @property
    def acceptance(self) -> float:
        """The fraction of proposed tokens that were accepted; 0 if none was proposed."""
        proposed = sum(self.proposed)
        return sum(self.accepted) / proposed if proposed else 0.0

    @property
    def tokens_per_step(self) -> float:
        """Mean new tokens of a row per step of the model, 1 in plain decoding; 0 without steps."""
        steps = sum(self.steps)
        return sum(self.tokens) / steps if steps else 0.0

    def __str__(self) -> str:
        """The report in words, such as `1.80 tokens/step, 40% of 100 proposed tokens accepted`."""
        if not any(self.proposed):
            return "nothing proposed"
        return (
            f"{self.tokens_per_step:.2f} tokens/step, {self.acceptance:.0%} of "
            f"{sum(self.proposed)} proposed tokens accepted"
        )
