r"""Regular expressions as deterministic automata over UTF-8 bytes, in NumPy tables.

The syntax is Python's; Python's own parser is used. Characters are Unicode code points, but `\d`,
`\w` and `\s` match ASCII only (`ascii_classes`).
"""

from __future__ import annotations

import itertools
import re
import re._constants as kinds  # type: ignore[import-not-found]
import re._parser as parser  # type: ignore[import-not-found]
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

MOST_STATES = 4096
LAST = 0x10FFFF
SURROGATES = (0xD800, 0xDFFF)
CLASSES = {"d": "0-9", "w": "0-9A-Za-z_", "s": r" \t\n\r\f\v"}
# The last code point with one, two, three and four bytes of UTF-8.
LENGTHS = (0x7F, 0x7FF, 0xFFFF, LAST)

Ranges = list[tuple[int, int]]


def ascii_classes(pattern: str) -> str:
    r"""The pattern with `\d`, `\w`, `\s`, `\D`, `\W` and `\S` replaced by sets of ASCII characters.

    Raises ValueError for `\D`, `\W` or `\S` within brackets.
    """
    found, is_inside, at = [], False, 0
    while at < len(pattern):
        here, escaped = pattern[at], pattern[at + 1 : at + 2]
        if here == "\\" and escaped.lower() in CLASSES and escaped:
            own = CLASSES[escaped.lower()]
            if is_inside and escaped.isupper():
                raise ValueError(
                    f"the regular expression has \\{escaped} in brackets: write the characters"
                )
            found.append(own if is_inside else f"[{'^' if escaped.isupper() else ''}{own}]")
            at += 2
            continue
        size = 2 if here == "\\" else 1
        if size == 1 and here == "[" and not is_inside:
            is_inside = True
            if pattern[at + 1 : at + 2] == "^":
                size += 1
            if pattern[at + size : at + size + 1] == "]":
                size += 1
        elif size == 1 and here == "]":
            is_inside = False
        found.append(pattern[at : at + size])
        at += size
    return "".join(found)


class ByteAutomaton(NamedTuple):
    """A minimal deterministic automaton over bytes. State 0 is the initial state.

    step: int32 [states, 256], the next state; -1 if no accepted text continues with the byte.
    accepts: bool [states], whether a text may end in the state.
    """

    step: np.ndarray
    accepts: np.ndarray

    @classmethod
    def of(cls, pattern: str, most: int = MOST_STATES) -> ByteAutomaton:
        """The automaton of the texts that a regular expression matches from begin to end.

        Raises ValueError for wrong syntax, for syntax that is not regular, such as look-around, for
        an automaton of more than `most` states, and for an expression that matches no text.
        """
        try:
            tree = parser.parse(ascii_classes(pattern))
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(f"the regular expression is wrong: {error}") from None
        flags = tree.state.flags
        nfa = _Nfa(most, dotall=bool(flags & re.DOTALL), ignores_case=bool(flags & re.IGNORECASE))
        items = list(tree)
        # Anchors at the ends of the whole text are redundant.
        items = items[1:] if items[:1] == [(kinds.AT, kinds.AT_BEGINNING)] else items
        items = items[:-1] if items[-1:] == [(kinds.AT, kinds.AT_END)] else items
        first = nfa.add()
        last = nfa.sequence(items, first)
        return _minimal(*_determined(nfa, first, last, most))


class _Nfa:
    """A nondeterministic automaton over bytes.

    ranges: of each state, transitions (low byte, high byte, next state). silent: of each state, the
    next states by epsilon transitions.
    """

    def __init__(self, most: int, *, dotall: bool, ignores_case: bool) -> None:
        self.silent: list[list[int]] = []
        self.ranges: list[list[tuple[int, int, int]]] = []
        self._most, self._dotall, self._ignores_case = most, dotall, ignores_case

    def add(self) -> int:
        """Adds a state; returns its index. Raises ValueError for too many states."""
        if len(self.silent) > 16 * self._most:
            raise ValueError(f"the regular expression needs more than {self._most} states")
        self.silent.append([])
        self.ranges.append([])
        return len(self.silent) - 1

    def sequence(self, items: Any, start: int) -> int:
        """Adds the parts of a sequence after state `start`; returns the last state."""
        for kind, value in items:
            start = self._part(kind, value, start)
        return start

    def _part(self, kind: Any, value: Any, start: int) -> int:
        if kind in (kinds.LITERAL, kinds.NOT_LITERAL, kinds.IN, kinds.ANY):
            return self._characters(self._ranges(kind, value), start)
        if kind is kinds.SUBPATTERN:
            _, added, removed, items = value
            if added or removed:
                raise ValueError("the regular expression has flags inside: put them in front")
            return self.sequence(items, start)
        if kind is kinds.BRANCH:
            end = self.add()
            for items in value[1]:
                self.silent[self.sequence(items, start)].append(end)
            return end
        if kind in (kinds.MAX_REPEAT, kinds.MIN_REPEAT):
            least, most, items = value
            return self._repeat(least, most, items, start)
        raise ValueError(
            f"the regular expression has {str(kind).lower()}, which no table can follow: "
            "leave it out"
        )

    def _repeat(self, least: int, most: Any, items: Any, start: int) -> int:
        for _ in range(least):
            start = self.sequence(items, start)
        if most is kinds.MAXREPEAT:
            begin = self.add()
            self.silent[start].append(begin)
            self.silent[self.sequence(items, begin)].append(begin)
            return begin
        end = self.add()
        for _ in range(most - least):
            self.silent[start].append(end)
            start = self.sequence(items, start)
        self.silent[start].append(end)
        return end

    def _ranges(self, kind: Any, value: Any) -> Ranges:
        """The ranges of code points that a part matches."""
        if kind is kinds.ANY:
            return [(0, LAST)] if self._dotall else _without([(10, 10)])
        if kind is kinds.LITERAL:
            return self._cased([(value, value)])
        if kind is kinds.NOT_LITERAL:
            return _without(self._cased([(value, value)]))
        found, is_opposite = [], False
        for own, part in value:
            if own is kinds.NEGATE:
                is_opposite = True
            elif own is kinds.LITERAL:
                found.append((part, part))
            elif own is kinds.RANGE:
                found.append(part)
            else:
                raise ValueError(f"the regular expression has {part} in brackets: leave it out")
        return _without(self._cased(found)) if is_opposite else self._cased(found)

    def _cased(self, ranges: Ranges) -> Ranges:
        """The ranges; if case is ignored, also the other case of ASCII letters."""
        if not self._ignores_case:
            return ranges
        letters = [(ord(a), ord(z), shift) for a, z, shift in (("A", "Z", 32), ("a", "z", -32))]
        more = [
            (max(low, a) + shift, min(high, z) + shift)
            for low, high in ranges
            for a, z, shift in letters
            if max(low, a) <= min(high, z)
        ]
        return [*ranges, *more]

    def _characters(self, ranges: Ranges, start: int) -> int:
        end = self.add()
        for low, high in ranges:
            for parts in _in_utf8(low, high):
                at = start
                for place, (first, last) in enumerate(parts):
                    to = end if place == len(parts) - 1 else self.add()
                    self.ranges[at].append((first, last, to))
                    at = to
        return end


def _without(ranges: Ranges) -> Ranges:
    """The complement of ranges: all other code points."""
    found, at = [], 0
    for low, high in sorted(ranges):
        if at < low:
            found.append((at, low - 1))
        at = max(at, high + 1)
    return [*found, (at, LAST)] if at <= LAST else found


def _in_utf8(low: int, high: int) -> Iterator[list[tuple[int, int]]]:
    """Sequences of byte ranges that together match a range of code points in UTF-8."""
    for begin, end in ((0, SURROGATES[0] - 1), (SURROGATES[1] + 1, LAST)):
        start = max(low, begin)
        for last in LENGTHS:
            stop = min(high, end, last)
            if start <= stop:
                yield from _of_length(start, stop)
                start = stop + 1


def _of_length(low: int, high: int) -> Iterator[list[tuple[int, int]]]:
    """As `_in_utf8`, for code points with the same number of bytes."""
    first, last = chr(low).encode(), chr(high).encode()
    for bits in (18, 12, 6):
        # Bytes after the first that differs must cover their full range.
        mask = (1 << bits) - 1
        if len(first) * 6 > bits and low >> bits != high >> bits:
            if low & mask:
                yield from _of_length(low, low | mask)
                yield from _of_length((low | mask) + 1, high)
                return
            if high & mask != mask:
                yield from _of_length(low, (high & ~mask) - 1)
                yield from _of_length(high & ~mask, high)
                return
    yield list(zip(first, last, strict=True))


def _determined(nfa: _Nfa, first: int, last: int, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Determinises an automaton: `step` int32 [states, 256], and `accepts` bool [states]."""

    def closed(states: set[int]) -> frozenset[int]:
        found, left = set(states), list(states)
        while left:
            for one in nfa.silent[left.pop()]:
                if one not in found:
                    found.add(one)
                    left.append(one)
        return frozenset(one for one in found if nfa.ranges[one] or one == last)

    begun = closed({first})
    numbers, rows = {begun: 0}, []
    for states in (queue := [begun]):
        edges = [edge for one in states for edge in nfa.ranges[one]]
        ends = sorted({0, 256} | {low for low, _, _ in edges} | {high + 1 for _, high, _ in edges})
        row = np.full(256, -1, np.int32)
        for low, high in itertools.pairwise(ends):
            to = {target for begin, end, target in edges if begin <= low <= end}
            if not to:
                continue
            if (found := closed(to)) not in numbers:
                if len(numbers) == most:
                    raise ValueError(f"the regular expression needs more than {most} states")
                numbers[found] = len(numbers)
                queue.append(found)
            row[low:high] = numbers[found]
        rows.append(row)
    return np.stack(rows), np.array([last in states for states in queue])


def _minimal(step: np.ndarray, accepts: np.ndarray) -> ByteAutomaton:
    """Minimises an automaton: dead states are removed, and equivalent states merged.

    Raises ValueError if no text is accepted.
    """
    lives = accepts.copy()
    while True:
        more = lives | ((step >= 0) & lives[step]).any(1)
        if (more == lives).all():
            break
        lives = more
    if not lives[0]:
        raise ValueError("the regular expression matches no text")
    step = np.where((step >= 0) & lives[step], step, -1)
    kinds_, count = accepts.astype(np.int64), 0
    while True:
        rows = np.column_stack([kinds_, np.where(step >= 0, kinds_[step], -1)])
        _, kinds_ = np.unique(rows, axis=0, return_inverse=True)
        kinds_ = kinds_.reshape(-1)
        if kinds_.max() + 1 == count:
            break
        count = int(kinds_.max()) + 1
    # Number the states in breadth-first order, the initial state first.
    order: dict[int, int] = {}
    for state in _reached(step):
        order.setdefault(int(kinds_[state]), state)
    numbers = np.full(count, -1, np.int32)
    for number, kind in enumerate(order):
        numbers[kind] = number
    chosen = np.array([*order.values()])
    own = step[chosen]
    return ByteAutomaton(np.where(own >= 0, numbers[kinds_[own]], -1), accepts[chosen])


def _reached(step: np.ndarray) -> Sequence[int]:
    """The states reachable from state 0, in breadth-first order."""
    queue, seen = [0], {0}
    for state in queue:
        for one in np.unique(step[state]).tolist():
            if one >= 0 and one not in seen:
                seen.add(one)
                queue.append(one)
    return queue
