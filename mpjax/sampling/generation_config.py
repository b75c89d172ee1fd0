"""Reads the sampling settings in a checkpoint's generation_config.json.

Missing keys leave fields off: transformers' default `top_k` of 50 isn't applied.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np

from mpjax.errors import CheckpointError
from mpjax.sampling.rules import KEYS, NEED_ENDS, TokenRule
from mpjax.sampling.settings import FILTERS, Sampling
from mpjax.sampling.token_lists import LONGEST_BAD_WORD, MOST_BAD_WORDS, MOST_BIASES, NO_ID

NAME = "generation_config.json"
DRAWING = ("temperature", *FILTERS)
LISTS = ("bad_words_ids", "suppress_tokens", "sequence_bias")
PLAIN = ("repetition_penalty", "min_new_tokens")
OBEYED = {*DRAWING, *LISTS, *PLAIN, *KEYS, "do_sample"}
# Keys of transformers that don't change sampling without beam search: token ids (read elsewhere),
# lengths (arguments here), outputs, caches, compilation, and assisted generation.
IRRELEVANT = {
    *("eos_token_id", "bos_token_id", "pad_token_id", "decoder_start_token_id"),
    *("max_length", "max_new_tokens", "max_time", "early_stopping", "num_return_sequences"),
    *("output_attentions", "output_hidden_states", "output_scores", "output_logits"),
    *("return_dict_in_generate", "renormalize_logits", "remove_invalid_values"),
    *("length_penalty", "diversity_penalty", "num_beam_groups"),
    *("encoder_repetition_penalty", "encoder_no_repeat_ngram_size"),
    *("use_cache", "cache_implementation", "cache_config", "max_cache_len", "prefill_chunk_size"),
    *("low_memory", "compile_config", "disable_compile", "continuous_batching_config"),
    *("is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule", "use_mtp"),
    *("assistant_confidence_threshold", "assistant_early_exit", "assistant_lookbehind"),
    *("assistant_ensemble_weight", "target_lookbehind", "prompt_lookup_num_tokens"),
    *("max_matching_ngram_size", "speculation_type"),
    *("_from_model_config", "transformers_version", "_name_or_path"),
}
# Neutral values of keys that mpjax doesn't support; null is neutral for all keys.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff", "penalty_alpha"), (0,)),
    **dict.fromkeys(("num_beams", "typical_p", "guidance_scale"), (1,)),
    **dict.fromkeys(("stop_strings", "force_words_ids", "constraints"), ([],)),
    **dict.fromkeys(("top_h", "forced_bos_token_id", "forced_eos_token_id", "dola_layers"), ()),
    "watermarking_config": (),
    "token_healing": (False,),
}


def read_sampling(values: Mapping[str, Any], where: str) -> Sampling | None:
    """The Sampling of the keys of generation_config.json; None if no key concerns sampling.

    `do_sample` chooses between sampling and greedy. Without it, a temperature or a filter implies
    sampling, although transformers' own default is greedy. A `top_k` of 0 or -1 is off, and a
    `top_p` of 0 keeps only the likeliest token. `suppress_tokens` become bad words of one token, or
    a rule if they are many. As in transformers, a bad word that is an end token alone is dropped.

    where: the file, for messages. Warns of unsupported keys with non-neutral values, of lists that
    are longer than a Sampling's, and of a `sequence_bias` of several tokens. Raises CheckpointError
    for values out of range.
    """
    given = {key: value for key, value in values.items() if value is not None}
    unfit = _unfit_lists(given)
    _warn_of_others(given, unfit, where)
    given = {key: value for key, value in given.items() if key not in unfit}
    do_sample = given.get("do_sample", any(name in given for name in DRAWING))
    if type(do_sample) is not bool:
        raise CheckpointError(f"{where}: do_sample is {do_sample!r:.80}: expected true or false")
    fields = {name: given[name] for name in DRAWING if name in given} if do_sample else {}
    if do_sample:
        fields = {"temperature": 1.0} | fields
    fields |= {name: given[name] for name in PLAIN if name in given}
    for name, value in fields.items():
        if type(value) not in (int, float, type(None)):
            raise CheckpointError(f"{where}: {name} is {value!r:.80}: expected a number")
    fields |= _lists(given, where)
    if rules := _rules(given, where):
        fields["rules"] = rules
    if not fields and "do_sample" not in given:
        return None
    if fields.get("top_k") in (0, -1):
        del fields["top_k"]
    if fields.get("top_p") == 0:
        fields |= {"top_k": 1, "top_p": None}
    try:
        return Sampling.of(fields)
    except ValueError as error:
        raise CheckpointError(f"{where}: {error}") from error


def _lists(given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The fields bad_words and logit_bias, from the keys in LISTS. Raises CheckpointError."""
    for name in LISTS:
        if not isinstance(given.get(name, []), list) and given[name] != {}:
            raise CheckpointError(f"{where}: {name} is {given[name]!r:.80}: expected a list")
    ends = given.get("eos_token_id")
    ends = [[i] for i in (ends if isinstance(ends, list) else [ends])]
    words = [word for word in given.get("bad_words_ids", []) if word not in ends]
    if not _are_many(given):
        words += [[i] for i in given.get("suppress_tokens", [])]
    biases = given.get("sequence_bias", [])
    pairs = [it for it in biases if isinstance(it, list) and len(it) == 2]
    single = [(ids[0], bias) for ids, bias in pairs if isinstance(ids, list) and len(ids) == 1]
    if len(single) < len(biases):
        raise CheckpointError(
            f"{where}: sequence_bias is {biases!r:.80}: expected pairs of a list with one token id "
            "and a number"
        )
    found = {"bad_words": words or None, "logit_bias": dict(single) or None}
    return {name: value for name, value in found.items() if value is not None}


def _are_many(given: Mapping[str, Any]) -> bool:
    """Whether `suppress_tokens` don't fit beside the bad words of a Sampling."""
    names = ("bad_words_ids", "suppress_tokens")
    lists = [it for name in names if isinstance(it := given.get(name, []), list)]
    return sum(map(len, lists)) > MOST_BAD_WORDS


def _rules(given: Mapping[str, Any], where: str) -> list[TokenRule]:
    """The rules of the keys that have some. Raises CheckpointError."""
    found, ends = [], _ends(given)
    for name, (accepts, expected, read) in KEYS.items():
        if not given.get(name) or (name == "suppress_tokens" and not _are_many(given)):
            continue
        if not accepts(given[name]):
            raise CheckpointError(f"{where}: {name} is {given[name]!r:.80}: expected {expected}")
        found.append(read(given[name], ends))
    return found


def _ends(given: Mapping[str, Any]) -> tuple[int, ...]:
    """The ids of eos_token_id that are numbers."""
    ends = given.get("eos_token_id")
    return tuple(i for i in (ends if isinstance(ends, list) else [ends]) if type(i) is int)


def _unfit_lists(given: Mapping[str, Any]) -> set[str]:
    """The keys that a Sampling can't follow; malformed ones are left to `_lists` and `_rules`.

    Their lists are too long, or the file has no eos_token_id.
    """
    lists = (given.get(name, []) for name in ("bad_words_ids", "sequence_bias"))
    words, biases = (it if isinstance(it, list) else [] for it in lists)
    long = (isinstance(word, list) and len(word) > LONGEST_BAD_WORD for word in words)
    several = (
        isinstance(it, list) and it and isinstance(it[0], list) and len(it[0]) > 1 for it in biases
    )
    is_unfit = {
        "bad_words_ids": len(words) > MOST_BAD_WORDS or any(long),
        "sequence_bias": len(biases) > MOST_BIASES or any(several),
        **dict.fromkeys(NEED_ENDS, not _ends(given)),
    }
    return {name for name, unfit in is_unfit.items() if unfit and given.get(name)}


def _warn_of_others(given: Mapping[str, Any], unfit: set[str], where: str) -> None:
    obeyed = (OBEYED | IRRELEVANT) - unfit
    ignored = [
        f"{key} {value!r:.40}"
        for key, value in given.items()
        if key not in obeyed and value not in NEUTRAL.get(key, ())
    ]
    if ignored:
        warnings.warn(f"{where} has {', '.join(ignored)}: mpjax does not follow it", stacklevel=3)


def to_fields(sampling: Sampling) -> dict[str, Any]:
    """The Sampling fields that generation_config.json supports, as JSON values, and its rules."""
    fields = {name: getattr(sampling, name) for name in (*DRAWING, *PLAIN, "rules")}
    found = {name: value for name, value in fields.items() if value is not None}
    if sampling.bad_words is not None:
        rows = np.asarray(sampling.bad_words).tolist()
        found["bad_words"] = [[i for i in row if i != NO_ID] for row in rows]
    if sampling.logit_bias is not None:
        pairs = (np.asarray(each).tolist() for each in sampling.logit_bias)
        found["logit_bias"] = dict(zip(*pairs, strict=True))
    return found


def to_keys(sampling: Sampling) -> dict[str, Any]:
    """The keys of generation_config.json that `read_sampling` converts to this Sampling."""
    found = to_fields(sampling)
    if words := found.pop("bad_words", None):
        found["bad_words_ids"] = words
    if biases := found.pop("logit_bias", None):
        found["sequence_bias"] = [[[i], value] for i, value in biases.items()]
    for rule in found.pop("rules", ()):
        found |= rule.keys()
    return {"do_sample": not sampling.greedy, **found}
