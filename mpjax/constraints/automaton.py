"""Constraints as tables on the device, which whole generations follow without the host."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.constraints.byte_automaton import ByteAutomaton
from mpjax.constraints.kinds import Constraint
from mpjax.kernels.checks import require_type
from mpjax.language_model import LanguageModel
from mpjax.sampling.processors import Processor
from mpjax.text.spelling import token_bytes
from mpjax.text.tokenizer import Tokenizer

MOST_CELLS = 1 << 22  # of the table of next states


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Automaton(Processor):
    """A constraint as tables: a processor for `generate_tokens`, `generate` and an `Engine`.

        automaton = mpjax.Automaton.of(lm, mpjax.Regex("[0-9]{4}-[0-9]{2}"))
        mpjax.generate_tokens(lm.model, ..., processors=(automaton,))

    Tokens that lead from each state to the same next one form a class.

    token_class: int16 [vocabulary]. step: int16 [states, classes], the next state; -1 where a token
    of the class is not allowed. State 0 is the first; behind the last, a stop id leads to itself.
    Both numbers are rounded up to powers of two, at least 64, so that small tables run the same
    programs.
    """

    token_class: Any
    step: Any

    @classmethod
    def of(cls, lm: LanguageModel, constraint: Constraint) -> Self:
        """The tables of a constraint for a model's tokens. A text ends with the model's stop ids.

        Raises ValueError for a constraint that has no table: a Grammar, a regular expression with
        look-around, a JSON schema with recursion or without bounds; and for a table that is too
        large. `constraint=` of `generate` and of an `Engine` takes these, too.
        """
        require_type("constraint", constraint, Constraint, hint=", such as mpjax.Regex(...)")
        name = type(constraint).__name__
        try:
            pattern = constraint.pattern_of_text()
            found = _tables(lm.require_tokenizer(), pattern, lm.model.columns, lm.usual_stop_ids)
        except ValueError as error:
            raise ValueError(
                f"Automaton: {name} has no table: {error}. `constraint=` of generate and of an "
                "Engine needs none"
            ) from None
        return cls(*found)

    def create(self, vocabulary: int) -> jax.Array:
        """The state, int32."""
        return jnp.int32(0)

    def __call__(self, logits: jax.Array, memory: jax.Array, number: jax.Array) -> jax.Array:
        """-inf for tokens that the state does not allow."""
        is_allowed = (self.step[memory] >= 0)[self.token_class]
        return jnp.where(is_allowed, logits, -jnp.inf)

    def advance(self, memory: jax.Array, token: jax.Array, is_new: jax.Array) -> jax.Array:
        """The next state."""
        after = self.step[memory, self.token_class[token]].astype(jnp.int32)
        return jnp.where(is_new & (after >= 0), after, memory)


@functools.lru_cache(maxsize=64)
def _tables(
    tokenizer: Tokenizer, pattern: str, columns: int, ends: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray]:
    """The arrays of an Automaton. Raises ValueError."""
    automaton = ByteAutomaton.of(pattern)
    states = len(automaton.step)
    classes = {np.full(states + 1, -1, np.int16).tobytes(): 0}  # of tokens that never come
    token_class = np.zeros(columns, np.int32)
    for ids, vectors in _reached(automaton, _levels(tokenizer, columns, ends)):
        rows = np.concatenate([vectors, np.full((len(ids), 1), -1, vectors.dtype)], 1)
        for token, row in zip(ids.tolist(), rows.astype(np.int16), strict=True):
            token_class[token] = classes.setdefault(row.tobytes(), len(classes))
    # A stop id, where a text may end, and behind it.
    end = np.append(np.where(automaton.accepts, states, -1), states).astype(np.int16)
    token_class[list(ends)] = classes.setdefault(end.tobytes(), len(classes))
    if len(classes) * (states + 1) > MOST_CELLS:
        raise ValueError(
            f"it has {states + 1} states and {len(classes)} classes of tokens, and the product may "
            f"be {MOST_CELLS}"
        )
    step = np.stack([np.frombuffer(row, np.int16) for row in classes], 1)
    stuck = [state for state in range(states) if (step[state] < 0).all()]
    if stuck:
        raise ValueError("the tokens of the model can't spell all texts of it")
    room = [(0, _rounded(size) - size) for size in step.shape]
    return token_class.astype(np.int16), np.pad(step, room, constant_values=-1)


def _rounded(size: int) -> int:
    return max(64, 1 << (size - 1).bit_length())


def _reached(automaton: ByteAutomaton, levels: Any) -> Any:
    """The ids of tokens, and the state that each leads to from each state: int32 [ids, states].

    Tokens are read along a tree of their bytes; branches that no state can follow are left out.
    """
    states = len(automaton.step)
    dead = states  # a state without next ones, in the place of -1
    step = np.full((states + 1, 256), dead, np.int32)
    step[:states] = np.where(automaton.step >= 0, automaton.step, dead)
    vectors = np.arange(states, dtype=np.int32)[None]  # of the node of each prefix
    lives = np.array([0])  # nodes that have vectors, in order
    for parents, bytes_, ids, nodes in levels:
        place = np.searchsorted(lives, parents)
        is_there = lives[np.minimum(place, len(lives) - 1)] == parents
        found = step[vectors[place[is_there]], bytes_[is_there][:, None]]
        is_alive = (found != dead).any(1)
        lives, vectors = np.flatnonzero(is_there)[is_alive], found[is_alive]
        if not len(lives):
            return
        own = np.searchsorted(lives, nodes)
        is_own = lives[np.minimum(own, len(lives) - 1)] == nodes
        reached = vectors[own[is_own]]
        yield ids[is_own], np.where(reached == dead, -1, reached)


@functools.lru_cache(maxsize=8)
def _levels(tokenizer: Tokenizer, columns: int, ends: tuple[int, ...]) -> list[Any]:
    """The tree of the bytes of tokens by depth: nodes of prefixes of 1, 2 … bytes.

    Returns for each depth the parent of each node, its byte, and the ids of the tokens that end at
    a node, with their nodes. Special tokens are in no text.
    """
    hidden = {*ends, *tokenizer.special_ids}
    known = range(min(columns, tokenizer.backend.get_vocab_size()))
    spelled = {i: token_bytes(tokenizer, i) for i in known if i not in hidden}
    ids = np.array([i for i, text in spelled.items() if text], np.int64)
    lengths = np.array([len(spelled[i]) for i in ids])
    node, levels = np.zeros(len(ids), np.int64), []
    for depth in range(int(lengths.max(initial=0))):
        is_longer = lengths > depth
        ids, lengths, node = ids[is_longer], lengths[is_longer], node[is_longer]
        here = np.array([spelled[i][depth] for i in ids], np.int64)
        keys, node = np.unique(node * 256 + here, return_inverse=True)
        is_last = lengths == depth + 1
        levels.append((keys >> 8, keys & 255, ids[is_last], node[is_last]))
    return levels
