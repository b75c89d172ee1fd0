"""Divides an answer into the reasoning before it and the text for the user.

Chat templates mark them: "<think>" and "</think>" are around the reasoning of Qwen3 and
DeepSeek-R1. In the harmony format of gpt-oss, an answer is several messages, each with a header
that names its channel: "<|channel|>analysis<|message|>" begins reasoning, and
"<|channel|>final<|message|>" the text for the user (OpenAI, "OpenAI harmony response format").
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

FINAL = "final"  # the channel of a message for the user


class Part(NamedTuple):
    """A piece of an answer's reasoning, or of its text for the user."""

    is_reasoning: bool
    text: str


@dataclasses.dataclass(frozen=True)
class Channels:
    """The markers of a chat template, and what follows each of them.

    states: for each marker, `text`, `reasoning`, `hidden` (such as a role's name), `name` (of a
        channel), or `named`: text where the last name is FINAL or there is none, else reasoning.
    required: markers that a template with these channels names.
    reasons_once: whether there is one part of reasoning, which begins the answer. Markers elsewhere
        are then text, such as in an answer about the markers.
    """

    states: Mapping[str, str]
    required: tuple[str, ...]
    reasons_once: bool = False

    @classmethod
    def of_template(cls, source: str) -> Channels | None:
        """The channels of a chat template, in Jinja source; None if it names no markers."""
        found = (each for each in KNOWN if all(marker in source for marker in each.required))
        return next(found, None)


def joined(parts: Sequence[Part]) -> tuple[str, str]:
    """The reasoning and the text for the user."""
    reasoning, text = (
        "".join(part.text for part in parts if part.is_reasoning == kind) for kind in (True, False)
    )
    return reasoning, text


class Splitter:
    """Divides an answer that comes in pieces.

    prompt: the text before the answer; where it ends with a marker, as some templates do, the
    answer goes on after that. Space after a marker is left out, and before the first one.
    """

    def __init__(self, channels: Channels, prompt: str = "") -> None:
        self._channels, self._states = channels, channels.states
        self._pattern = re.compile("(" + "|".join(map(re.escape, channels.states)) + ")")
        self._state, self._name, self._held = "text", "", ""
        self._has_begun = True  # whether space counts, since a part has any other character
        self._is_new = True  # whether all before is space or begins reasoning
        for marker in self._states:
            if prompt.rstrip().endswith(marker):
                self._enter(self._states[marker])

    def push(self, piece: str) -> list[Part]:
        """Adds a piece; returns the parts that are certain, without markers."""
        text = self._held + piece
        held = self._beginning(text)
        if self._is_new and not text[: len(text) - held].strip():
            held = len(text)  # space that a marker may follow
        self._held = text[len(text) - held :]
        return self._divide(text[: len(text) - held])

    def finish(self) -> list[Part]:
        """The rest, which no marker ends."""
        rest, self._held = self._held, ""
        return self._divide(rest)

    def _beginning(self, text: str) -> int:
        """The number of characters at the end that may begin a marker."""
        return max(
            (
                size
                for marker in self._states
                for size in range(1, len(marker))
                if text.endswith(marker[:size])
            ),
            default=0,
        )

    def _divide(self, text: str) -> list[Part]:
        parts = []
        pieces = self._pattern.split(text)
        if self._is_new and len(pieces) > 1 and self._counts(pieces[1]) and not pieces[0].strip():
            pieces[0] = ""
        for index, piece in enumerate(pieces):
            if index % 2 and self._counts(piece):
                self._enter(self._states[piece])
            elif self._state == "name":
                self._name += piece
            elif self._state != "hidden" and (shown := self._without_space(piece)):
                parts.append(Part(self._state == "reasoning", shown))
                self._is_new = False
        return parts

    def _counts(self, marker: str) -> bool:
        """Whether a marker divides the answer here, and is not text."""
        if not self._channels.reasons_once:
            return True
        return self._is_new if self._states[marker] == "reasoning" else self._state == "reasoning"

    def _enter(self, state: str) -> None:
        """Goes on after a marker."""
        if state == "named":
            name = self._name.split()
            state = "reasoning" if name and name[0] != FINAL else "text"
        if state != "hidden":
            self._name = ""
        self._state, self._has_begun = state, False
        self._is_new &= state == "reasoning"

    def _without_space(self, piece: str) -> str:
        """The piece, without space at the begin of a part that follows a marker."""
        if not self._has_begun:
            piece = piece.lstrip()
            self._has_begun = bool(piece)
        return piece


HARMONY = Channels(
    {
        "<|start|>": "hidden",
        "<|channel|>": "name",
        "<|constrain|>": "hidden",
        "<|message|>": "named",
        "<|end|>": "hidden",
        "<|call|>": "hidden",
        "<|return|>": "hidden",
    },
    ("<|channel|>", "<|message|>"),
)
THINK = Channels({"<think>": "reasoning", "</think>": "text"}, ("</think>",), reasons_once=True)
KNOWN = (HARMONY, THINK)
