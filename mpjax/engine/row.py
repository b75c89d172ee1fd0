"""A request as the planner sees it, with what planned programs add to it."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

from mpjax.adapters.collection import Loaded
from mpjax.engine.pages import first_key, page_key
from mpjax.models import RopeScaling


@dataclasses.dataclass(eq=False)
class Row:
    """A request, as the planner sees it.

    number: in the order of arrival. tokens: those of the prompt, and the new ones that are known.
    prompt: the number of the prompt's. most: the most new tokens.
    priority: rows of a higher one come first. shares: whether it may take pages of other rows.
    scored: whether the prompt's log-probabilities are wanted. owner: whose request it is.
    behind: the token behind the prompt, which is scored and not read; empty for none.
    greedy_from: the number of new tokens from which it takes its likeliest tokens, as they are;
        None for never. is_controlled: whether it has logits processors. is_constrained: whether
        the host says which tokens it may draw.
    scaling: of rotary frequencies, where it depends on the tokens of a row. adapter: with which its
        tokens are read; None for none.

    slot: its place among the rows that run, or None while it waits. runs: how often it was given a
        slot. is_fresh: whether its slot has read nothing yet.
    pages: of its tokens, in order, for each group of layers. target: tokens to read before the next
        one is drawn. certain: tokens in the cache that are known to be finite.
    length: tokens in the cache at most, and drawn: new tokens at least, both after all planned
        programs. flights: of planned programs that draw tokens of the row and are not read yet, the
        fewest and the most tokens.
    keys: of pages with its first tokens. published: how many of its pages others can find.
    shared: tokens of the prompt that were in pages of others when it was first given a slot.
    stations: numbers of tokens behind which a snapshot of its states is kept. snapshots: by these
        numbers, places that are not known to be finite yet.
    is_known: whether the planner has it. rotary_length: with which it is read; see RopeScaling.
    """

    number: int
    tokens: list[int]
    prompt: int
    most: int
    priority: int = 0
    shares: bool = True
    scored: bool = False
    behind: Sequence[int] = ()
    owner: Any = None
    greedy_from: int | None = 0
    is_controlled: bool = False
    is_constrained: bool = False
    scaling: RopeScaling | None = None
    adapter: Loaded | None = None
    slot: int | None = None
    runs: int = 0
    is_fresh: bool = False
    pages: list[list[int]] = dataclasses.field(default_factory=list)
    target: int = 0
    certain: int = 0
    length: int = 0
    drawn: int = 0
    flights: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    keys: list[bytes] = dataclasses.field(default_factory=list)
    published: int = 0
    stations: set[int] = dataclasses.field(default_factory=set)
    snapshots: dict[int, int] = dataclasses.field(default_factory=dict)
    shared: int = 0
    is_known: bool = False
    rotary_length: int = 0

    @property
    def order(self) -> tuple[int, int]:
        """Rows with a smaller one come first."""
        return -self.priority, self.number

    @property
    def is_reading(self) -> bool:
        """Whether tokens are left to read before the next one is drawn."""
        return self.length < self.target

    @property
    def is_greedy(self) -> bool:
        """Whether it is known that all further tokens are the likeliest ones."""
        return self.greedy_from is not None and self.greedy_from <= len(self.tokens) - self.prompt

    @property
    def left(self) -> int:
        """The most tokens that may still be drawn."""
        return self.most - self.drawn

    def draw(self, least: int, most: int) -> None:
        """Counts the tokens of a program that is planned, unless the row ends before."""
        self.flights.append((least, most))
        self._count()

    @property
    def space(self) -> int:
        """The most tokens that the cache can grow by before the row has to be read again."""
        after = None if self.scaling is None or self.rotary_length else self.scaling.rereads_after
        return sys.maxsize if after is None else after - self.length

    @property
    def can_draw(self) -> bool:
        """Whether a token can be drawn next."""
        return not self.is_reading and self.left > 0 and self.space > 0

    @property
    def has_to_reread(self) -> bool:
        """Whether the row, of which all tokens are known, goes on only if it is read again."""
        return not self.flights and self.left > 0 and self.space == 0

    def set_rotary_length(self) -> None:
        """Sets the rotary length before the row is read from its first token on."""
        if self.scaling is None:
            return
        length = self.scaling.rotary_length(self.prompt, len(self.tokens))
        if length != self.rotary_length:
            self.rotary_length, self.keys = length, []

    def page_keys(self, pages: int, page_size: int) -> list[bytes]:
        """The keys of the row's first pages."""
        while len(self.keys) < pages:
            at = len(self.keys) * page_size
            own = b"" if self.adapter is None else self.adapter.key
            before = self.keys[-1] if self.keys else first_key(self.rotary_length, own)
            self.keys.append(page_key(before, self.tokens[at : at + page_size]))
        return self.keys[:pages]

    def learn(self, tokens: Sequence[int]) -> None:
        """Adds the new tokens of the first planned program that was not read."""
        self.tokens.extend(tokens)
        self.certain = max(self.certain, len(self.tokens) - 1)
        if self.flights:
            self.flights.pop(0)
            self._count()

    def growth(self, most: int) -> int:
        """The most tokens that the cache grows by in a program that draws up to `most`."""
        return min(self._most_known(most), self._end) - self.length

    @property
    def _end(self) -> int:
        """The tokens in the cache behind which the row has ended, or has to be read again."""
        return min(self.prompt + self.most - 1, self.length + self.space)

    def _most_known(self, more: int = 0) -> int:
        return len(self.tokens) - 1 + sum(most for _, most in self.flights) + more

    def _count(self) -> None:
        new = len(self.tokens) - self.prompt
        self.length = min(self._most_known(), self._end)
        self.drawn = min(new + sum(least for least, _ in self.flights), self.most)
