"""Reads the sampling settings in a checkpoint's generation_config.json.

Missing keys leave fields off: transformers' default `top_k` of 50 isn't applied.
"""

from __future__ import annotations

import json
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
NO_FILTER = {"typical_p": 1, "epsilon_cutoff": 0, "eta_cutoff": 0}  # their neutral values
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
# Keys that are refused unless they have one of these values, or null.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "penalty_alpha": (0,),
    **dict.fromkeys(("num_beams", "guidance_scale"), (1,)),
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

    where: the file, for messages. Warns of keys that are not known. Raises CheckpointError for
    values out of range, for a key that would change what is drawn and is not supported, for lists
    that are longer than a Sampling's, and for a `sequence_bias` of several tokens.
    """
    off = NO_FILTER.items()
    given = {key: it for key, it in values.items() if it is not None and (key, it) not in off}
    _require_supported(given, where)
    do_sample = _samples(given, where)
    fields = {name: given[name] for name in DRAWING if name in given} if do_sample else {}
    if do_sample:
        fields = {"temperature": 1.0} | fields
    fields |= {name: given[name] for name in PLAIN if name in given}
    for name, value in fields.items():
        if type(value) not in (int, float, type(None)):
            raise CheckpointError(f"{where}: {name} is {value!r:.80}: expected a number")
    fields |= _lists(given, where)
    if rules := _rules(given, where, do_sample=do_sample):
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


def _samples(given: Mapping[str, Any], where: str) -> bool:
    """Whether tokens are drawn at random. Raises CheckpointError."""
    found = given.get("do_sample", any(name in given for name in (*DRAWING, *NO_FILTER)))
    if type(found) is not bool:
        raise CheckpointError(f"{where}: do_sample is {found!r:.80}: expected true or false")
    return found


def _lists(given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The fields bad_words and logit_bias, from the keys in LISTS. Raises CheckpointError."""
    for name in LISTS:
        if not isinstance(given.get(name, []), list) and given[name] != {}:
            raise CheckpointError(f"{where}: {name} is {given[name]!r:.80}: expected a list")
    words, _ = _banned(given)
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


def _banned(given: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
    """The bad words of a Sampling, and the tokens of a rule, if there are too many bad words."""
    lists = (given.get(name, []) for name in ("bad_words_ids", "suppress_tokens"))
    words, ids = (it if isinstance(it, list) else [] for it in lists)
    ends = given.get("eos_token_id")
    ends = [[i] for i in (ends if isinstance(ends, list) else [ends])]
    words = [word for word in words if word not in ends]
    if len(words) + len(ids) <= MOST_BAD_WORDS:
        return words + [[i] for i in ids], []
    if len(words) <= MOST_BAD_WORDS:
        return words, ids
    single = [isinstance(word, list) and len(word) == 1 for word in words]
    more = [word[0] for word, is_one in zip(words, single, strict=True) if is_one]
    return [word for word, is_one in zip(words, single, strict=True) if not is_one], more + ids


def _rules(given: Mapping[str, Any], where: str, *, do_sample: bool) -> list[TokenRule]:
    """The rules of the keys that have some. Raises CheckpointError."""
    found, ends, (_, banned) = [], _ends(given), _banned(given)
    given = {**given, "suppress_tokens": banned}
    for name, (accepts, expected, read) in KEYS.items():
        is_off = not do_sample if name in NO_FILTER else not given.get(name)
        if is_off or name not in given:
            continue
        if not accepts(given[name]):
            raise CheckpointError(f"{where}: {name} is {given[name]!r:.80}: expected {expected}")
        found.append(read(given[name], ends))
    return found


def _ends(given: Mapping[str, Any]) -> tuple[int, ...]:
    """The ids of eos_token_id that are numbers."""
    ends = given.get("eos_token_id")
    return tuple(i for i in (ends if isinstance(ends, list) else [ends]) if type(i) is int)


def _require_supported(given: Mapping[str, Any], where: str) -> None:
    """Warns of unknown keys. Raises CheckpointError for keys and lists that can't be obeyed.

    Malformed lists are left to `_lists` and `_rules`.
    """
    words, _ = _banned(given)
    biases = it if isinstance(it := given.get("sequence_bias", []), list) else []
    several = [it for it in biases if isinstance(it, list) and it and _is_long(it[0], 1)]
    reasons = {
        "bad_words_ids": (
            len(words) > MOST_BAD_WORDS or any(_is_long(word, LONGEST_BAD_WORD) for word in words),
            f"at most {MOST_BAD_WORDS} words of up to {LONGEST_BAD_WORD} tokens",
        ),
        "sequence_bias": (
            len(biases) > MOST_BIASES or bool(several),
            f"at most {MOST_BIASES} biases, of one token each",
        ),
    }
    for key in NEED_ENDS:
        reasons[key] = bool(given.get(key)) and not _ends(given), "an eos_token_id beside it"
    for key, neutral in NEUTRAL.items():
        usual = " or ".join(json.dumps(value) for value in (*neutral, None))
        reasons[key] = given.get(key) not in (*neutral, None), f"{usual}, since it is not supported"
    for key, (is_unfit, expected) in reasons.items():
        if is_unfit:
            raise CheckpointError(
                f"{where}: {key} is {given[key]!r:.80}: expected {expected}. Without the key, the "
                "model can be loaded"
            )
    known = OBEYED | IRRELEVANT | {*NEUTRAL}
    if unknown := [f"{key} {value!r:.40}" for key, value in given.items() if key not in known]:
        warnings.warn(f"{where} has {', '.join(unknown)}: mpjax does not know it", stacklevel=3)


def _is_long(ids: Any, most: int) -> bool:
    return isinstance(ids, list) and len(ids) > most


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
