"""Converts the `generation_kwargs` of an lm_eval task to arguments of `mpjax.generate`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from mpjax.arguments import stop_strings
from mpjax.kernels.checks import whole_number
from mpjax.sampling.settings import FILTERS, Sampling

# Names of max_new_tokens in tasks. If a task has several, the first here counts, as in lm_eval.
NEW_TOKENS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")


@dataclasses.dataclass(frozen=True)
class GenerationArguments:
    """Arguments of `mpjax.generate` for a request."""

    max_new_tokens: int
    stop: tuple[str, ...]
    sampling: Sampling


def generation_arguments(kwargs: Mapping[str, Any], max_new_tokens: int) -> GenerationArguments:
    """Reads `until`, `max_gen_toks`, `do_sample`, `temperature` and the filters of Sampling.

    max_new_tokens: the default for a task without its own limit.

    Generation is greedy unless `do_sample` is true, or missing beside a temperature above 0; greedy
    generation ignores the filters. A `top_k` of 0 or -1 switches it off. Raises ValueError for an
    argument that mpjax doesn't have and that would change the results.
    """
    rest = {name: value for name, value in kwargs.items() if value is not None}
    until = rest.pop("until", None)
    texts = [text for text in until if text] if isinstance(until, list | tuple) else until or None
    stop = tuple(stop_strings(texts))
    lengths = [_tokens(name, rest.pop(name)) for name in NEW_TOKENS if name in rest]
    temperature = rest.pop("temperature", None)
    if not rest.pop("do_sample", bool(temperature)):
        temperature = 0.0
    elif temperature is None:
        temperature = 1.0
    if rest.get("top_k") in (0, -1):
        del rest["top_k"]  # other libraries' values for "no top_k"
    if temperature == 0:  # greedy: values of filters that Sampling would refuse don't matter
        rest = {name: value for name, value in rest.items() if name not in FILTERS}
    names = (*FILTERS, "repetition_penalty")
    given = {name: rest.pop(name) for name in names if name in rest}
    sampling = Sampling.of({"temperature": temperature, **given})
    if rest.get("num_beams") == 1:
        del rest["num_beams"]  # one beam is no beam search
    if rest:
        unknown = ", ".join(f"{name}={rest[name]!r}" for name in sorted(rest))
        known = ", ".join(("until", "do_sample", "temperature", *names, *NEW_TOKENS))
        raise ValueError(f"generation_kwargs have {unknown}: expected {known}")
    return GenerationArguments(lengths[0] if lengths else max_new_tokens, stop, sampling)


def _tokens(name: str, value: Any) -> int:
    """A number of tokens as an int; some tasks write 64.0. Raises ValueError for others."""
    is_whole = isinstance(value, float) and value.is_integer()
    return whole_number(name, int(value) if is_whole else value)
