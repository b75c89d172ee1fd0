"""What speculation has gained, as `generate` reports it."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class SpeculationReport:
    """Counts of a batch's speculation; lists have an entry for each prompt.

    proposed, accepted: numbers of proposed tokens, and of those that the model accepted.
    steps: steps of the model in which the row got a token or more.
    tokens: new tokens of these steps, which is all but each row's first. If a row ends at a stop
        string, they include those after it that were generated before the host saw it.
    """

    proposed: list[int]
    accepted: list[int]
    steps: list[int]
    tokens: list[int]

    def __add__(self, other: SpeculationReport) -> SpeculationReport:
        """The report of the same prompts after more was generated."""
        pairs = zip(self._lists, other._lists, strict=True)
        sums = ([old + new for old, new in zip(*lists, strict=True)] for lists in pairs)
        return SpeculationReport(*sums)

    @classmethod
    def join(cls, reports: Sequence[SpeculationReport | None]) -> SpeculationReport | None:
        """The report of all prompts of several; None counts as one without a step.

        Returns None if there is no report at all.
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
        """The share of proposed tokens that were accepted; 0 where none was proposed."""
        proposed = sum(self.proposed)
        return sum(self.accepted) / proposed if proposed else 0.0

    @property
    def tokens_per_step(self) -> float:
        """New tokens of a row for each step of the model, 1 in plain decoding; 0 without a step."""
        steps = sum(self.steps)
        return sum(self.tokens) / steps if steps else 0.0

    def __str__(self) -> str:
        """A part of a sentence."""
        if not any(self.proposed):
            return "nothing proposed"
        return (
            f"{self.tokens_per_step:.2f} tokens/step, {self.acceptance:.0%} of "
            f"{sum(self.proposed)} proposed tokens accepted"
        )
