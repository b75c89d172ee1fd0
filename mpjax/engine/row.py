"""Row: the planner's view of a request, with lengths after all planned programs."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

from mpjax.adapters.collection import Loaded
from mpjax.engine.pages import first_key, page_key
from mpjax.engine.watching import Watched
from mpjax.models import RopeScaling


@dataclasses.dataclass(eq=False)
class Row:
    """The planner's view of a request.

    number: index in order of arrival. tokens: the prompt's ids, and the new ones the host has read.
    prompt: the number of the prompt's tokens. most: the most new tokens.
    priority: rows of a higher one come first. shares: whether it uses the prefix cache. scored:
        whether the prompt's log-probabilities are wanted. owner: the Request.
    behind: the token after the prompt, which is scored and not prefilled; empty for none.
    greedy_from: the number of new tokens from which it is greedy; None for never. is_controlled:
        whether it has logits processors. is_constrained: whether it has a constraint, so that the
        host computes token masks.
    scaling: the RopeScaling, if rotary frequencies depend on a row's length. adapter: or None.
        watched: its captures and changes of activations, or None.
    slot: its slot in the engine; None while it waits. runs: how often it got a slot. is_fresh:
        whether nothing was prefilled in the slot yet.
    pages: the pages of its tokens, in order, for each group of layers. target: tokens to prefill
        before the next one is drawn. certain: tokens in the cache known to be finite.
    length: upper bound of its tokens in the cache, and drawn: lower bound of its new tokens, both
        after all planned programs. flights: for each planned program whose tokens the host has not
        read, the fewest and the most tokens that it draws.
    keys: prefix-cache keys of its first pages. published: number of its published pages. shared:
        tokens of the prompt found in the prefix cache when it first got a slot.
    stations: numbers of tokens after which a snapshot of its recurrent states is kept. snapshots:
        by these numbers, the snapshots' places, until known to be finite.
    forced: the number of last tokens that were not drawn, since a constraint allows them alone, and
        that the request has not got yet. awaits: whether it draws no more before such tokens.
    is_known: whether it was submitted to the planner. version: of the weights when it got its slot.
    rotary_length: see RopeScaling. turn: of the last decoding program, or of when it got its slot.
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
    watched: Watched | None = None
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
    forced: int = 0
    awaits: bool = False
    is_known: bool = False
    version: int = 0
    rotary_length: int = 0
    turn: int = 0

    @property
    def order(self) -> tuple[int, int]:
        """The sort key of rows; the smallest comes first."""
        return -self.priority, self.number

    @property
    def is_reading(self) -> bool:
        """Whether prefill is unfinished."""
        return self.length < self.target

    @property
    def forced_tokens(self) -> list[int]:
        """The forced tokens that the request has not got yet."""
        return self.tokens[len(self.tokens) - self.forced :]

    @property
    def is_scored(self) -> bool:
        """Whether the tokens to prefill next are scored."""
        return self.scored or self.forced > 0

    @property
    def kind(self) -> Any:
        """Equal for rows that can be in one program; None for rows that are not watched."""
        return None if self.watched is None else self.watched.kind

    def force(self, tokens: Sequence[int]) -> None:
        """Adds tokens that are prefilled, not drawn; the row has no programs in flight."""
        self.tokens.extend(tokens)
        self.forced, self.target = len(tokens), len(self.tokens)

    def take_forced(self) -> list[int]:
        """Pops the forced tokens; `learn` adds them again, or the constraint forces them again."""
        tokens, self.forced = self.forced_tokens, 0
        del self.tokens[len(self.tokens) - len(tokens) :]
        return tokens

    @property
    def is_greedy(self) -> bool:
        """Whether all further tokens are known to be greedy."""
        return self.greedy_from is not None and self.greedy_from <= len(self.tokens) - self.prompt

    @property
    def left(self) -> int:
        """The most new tokens that can still be planned."""
        return self.most - self.drawn

    def restart(self) -> None:
        """Forgets all new tokens, and the keys of pages with them; the row waits."""
        del self.tokens[self.prompt :]
        self.drawn, self.keys = 0, []

    def draw(self, least: int, most: int) -> None:
        """Counts the `least` to `most` tokens that a planned program draws of the row."""
        self.flights.append((least, most))
        self._count()

    @property
    def space(self) -> int:
        """How many tokens the cache can grow by before the row must be prefilled again."""
        after = None if self.scaling is None or self.rotary_length else self.scaling.rereads_after
        return sys.maxsize if after is None else after - self.length

    @property
    def can_draw(self) -> bool:
        """Whether the row can decode next."""
        return not (self.is_reading or self.awaits) and self.left > 0 and self.space > 0

    @property
    def has_to_reread(self) -> bool:
        """Whether the row, without programs in flight, must be prefilled again to continue."""
        return not self.flights and self.left > 0 and self.space == 0

    def set_rotary_length(self) -> None:
        """Sets the rotary length, before the row is prefilled from its first token."""
        if self.scaling is None:
            return
        length = self.scaling.rotary_length(self.prompt, len(self.tokens))
        if length != self.rotary_length:
            self.rotary_length, self.keys = length, []

    def page_keys(self, pages: int, page_size: int) -> list[bytes]:
        """The prefix-cache keys of the row's first `pages` pages."""
        while len(self.keys) < pages:
            at = len(self.keys) * page_size
            own = b"" if self.adapter is None else self.adapter.key
            steer = b"" if self.watched is None else self.watched.key
            before = self.keys[-1] if self.keys else first_key(self.rotary_length, own, steer)
            self.keys.append(page_key(before, self.tokens[at : at + page_size]))
        return self.keys[:pages]

    def learn(self, tokens: Sequence[int], programs: int = 1) -> None:
        """Adds the new tokens of the earliest program in flight, or of several."""
        self.tokens.extend(tokens)
        self.certain = max(self.certain, len(self.tokens) - 1)
        if self.flights:
            del self.flights[:programs]
            self._count()

    def growth(self, most: int) -> int:
        """The most tokens that the cache grows by in a program that draws up to `most`."""
        return min(self._most_known(most), self._end) - self.length

    @property
    def _end(self) -> int:
        """The cache length at which the row ends or must be prefilled again, whichever is first."""
        return min(self.prompt + self.most - 1, self.length + self.space)

    def _most_known(self, more: int = 0) -> int:
        return len(self.tokens) - 1 + sum(most for _, most in self.flights) + more

    def _count(self) -> None:
        new = len(self.tokens) - self.prompt
        self.length = min(self._most_known(), self._end)
        self.drawn = min(new + sum(least for least, _ in self.flights), self.most)
