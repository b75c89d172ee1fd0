"""Transition tables over tokens, made from automata over bytes."""

from __future__ import annotations

import functools
import itertools
from typing import Any, NamedTuple

import numpy as np

from mpjax.constraints.byte_automaton import ByteAutomaton
from mpjax.constraints.matcher import Follower
from mpjax.text.spelling import token_bytes
from mpjax.text.tokenizer import Tokenizer

MOST_CELLS = 1 << 22  # the most entries of the table of next states
LEAST_SIZE = 64  # the least number of states, and of classes, in a rounded table


class Words(NamedTuple):
    """A model's tokens. columns: the number of logits. ends: the ids that end a text."""

    tokenizer: Tokenizer
    columns: int
    ends: tuple[int, ...]


class TokenTable(NamedTuple):
    """The arrays of an Automaton, before their sizes are rounded."""

    token_class: np.ndarray
    step: np.ndarray

    def rounded(self, least: int = LEAST_SIZE) -> TokenTable:
        """The table padded to powers of two, at least `least`."""
        room = [(0, max(least, 1 << (size - 1).bit_length()) - size) for size in self.step.shape]
        return TokenTable(self.token_class, np.pad(self.step, room, constant_values=-1))


@functools.lru_cache(maxsize=64)
def token_table(
    words: Words, pattern: str, grammar: str, most_states: int, most_work: int
) -> TokenTable:
    """The table of a regular expression. grammar: of the same texts, for llguidance.

    If only one continuation of the text is possible, the table allows only the token with which the
    tokenizer would begin it, as llguidance computes.

    most_states: of the pattern's automaton. most_work: limit of all state transitions over token
    bytes. Raises ValueError above either, for a table that is too large, and for texts that the
    tokens can't spell.
    """
    automaton = ByteAutomaton.of(pattern, most_states)
    states = len(automaton.step)
    token_class, step = _classes(_reached(automaton, words, most_work), words.columns, states)
    # Stop ids are allowed where a text may end, and lead to a last state that allows only them.
    end = np.append(np.where(automaton.accepts, states, -1), states).astype(np.int16)
    token_class[list(words.ends)] = step.shape[1]
    step = np.column_stack([step, end])
    step = _with_only_tokens(automaton, step, token_class, words, grammar)
    if (step[:states] < 0).all(1).any():
        raise ValueError("the tokens of the model can't spell all texts of it")
    if step.size > MOST_CELLS:
        raise ValueError(
            f"it has {len(step)} states and {step.shape[1]} classes of tokens, and the product may "
            f"be {MOST_CELLS}"
        )
    return TokenTable(token_class.astype(np.int16), step)


def _classes(
    reached: tuple[np.ndarray, np.ndarray, np.ndarray], columns: int, states: int
) -> tuple[np.ndarray, np.ndarray]:
    """The class of each token, and the next states [states + 1, classes]. reached: of `_reached`.

    Tokens with the same next state from every state share a class. Tokens of class 0 are allowed in
    no state.
    """
    tokens, before, after = reached
    for seed in itertools.count():
        # A random hash of each token's transitions tells classes apart; collisions are negligible.
        weights = np.random.default_rng(seed).integers(1, 1 << 63, (states, 2), np.uint64)
        sums = np.zeros(columns, np.uint64)
        np.add.at(sums, tokens, weights[before, 0] * (weights[after, 1] | np.uint64(1)))
        different, token_class = np.unique(np.append(np.uint64(0), sums), return_inverse=True)
        token_class = token_class.reshape(-1)[1:]
        step = np.full((states + 1, len(different)), -1, np.int16)
        step[before, token_class[tokens]] = after
        counts = np.bincount(tokens, minlength=columns)
        is_equal = (step[before, token_class[tokens]] == after).all()
        if is_equal and ((step >= 0).sum(0)[token_class] == counts).all():
            break
    return token_class, step


def _with_only_tokens(
    automaton: ByteAutomaton, step: np.ndarray, token_class: np.ndarray, words: Words, grammar: str
) -> np.ndarray:
    """The table with only the forced token in states that have one; changes token_class."""
    is_forced = ((automaton.step >= 0).sum(1) == 1) & ~automaton.accepts
    if not is_forced.any():
        return step
    tokens = dict(zip(token_class.tolist(), range(len(token_class)), strict=True))  # of each class
    followers, only = {0: Follower.of(*words, grammar)}, {}
    for state in (queue := [0]):
        own = followers[state]
        if is_forced[state] and (token := own.only_token()) is not None:
            only[state] = token
        for kind in np.unique(step[state], return_index=True)[1].tolist():
            after = int(step[state, kind])
            if after >= 0 and after not in followers and after < len(automaton.step):
                followers[after] = own.after(tokens[kind])
                queue.append(after)
    forced = list(dict.fromkeys(only.values()))
    step = np.concatenate([step, step[:, token_class[forced]]], 1)
    token_class[forced] = step.shape[1] - len(forced) + np.arange(len(forced))
    for state, token in only.items():
        after = step[state, token_class[token]]
        step[state] = -1
        step[state, token_class[token]] = after
    return step


def _reached(
    automaton: ByteAutomaton, words: Words, most_work: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """All allowed transitions: tokens, states before and states after them, int [transitions].

    All states are advanced together along a trie of the tokens' bytes. Raises ValueError for more
    than `most_work` steps.
    """
    states, work = len(automaton.step), 0
    node, before, now = np.zeros(states, np.int64), np.arange(states), np.arange(states)
    found: list[tuple[np.ndarray, ...]] = []
    for parents, bytes_, ids, nodes in _levels(words.tokenizer, words.columns):
        first = np.searchsorted(node, parents)
        counts = np.searchsorted(node, parents, side="right") - first
        if (work := work + int(counts.sum())) > most_work:
            raise ValueError(f"its states would be followed along more than {most_work} bytes")
        node = np.repeat(np.arange(len(parents)), counts)
        source = np.arange(len(node)) + (first - np.cumsum(counts) + counts)[node]
        now = automaton.step[now[source], bytes_[node]]
        node, before, now = (each[now >= 0] for each in (node, before[source], now))
        # The states at nodes where tokens end; several tokens may have the same bytes.
        first = np.searchsorted(node, nodes)
        counts = np.searchsorted(node, nodes, side="right") - first
        token = np.repeat(np.arange(len(ids)), counts)
        own = np.arange(len(token)) + (first - np.cumsum(counts) + counts)[token]
        found.append((ids[token], before[own], now[own]))
    tokens, before, after = (np.concatenate(each) for each in zip(*found, strict=True))
    return tokens, before, after


@functools.lru_cache(maxsize=8)
def _levels(tokenizer: Tokenizer, columns: int) -> list[Any]:
    """The trie of the tokens' bytes by depth: nodes of prefixes of 1, 2 … bytes.

    Returns for each depth the parent and the byte of each node, the ids of the tokens that end at
    this depth, and their nodes. Special tokens are left out.
    """
    known = range(min(columns, tokenizer.backend.get_vocab_size()))
    spelled = {i: token_bytes(tokenizer, i) for i in known if i not in tokenizer.special_ids}
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
