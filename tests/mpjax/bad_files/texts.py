"""Values in the files of a tokenizer, one case a line."""

from __future__ import annotations

from tests.mpjax.bad_files.any_file import reading
from tests.mpjax.bad_files.ways import DEEP, Case, Way, edit, link, pipe, steps, text, without


def tokenizer_config(**changes: object) -> Way:
    return edit("tokenizer_config.json", **changes)


def added(tokens: object) -> Way:
    return tokenizer_config(added_tokens_decoder=tokens)


def map_of_tokens(**changes: object) -> Way:
    return steps(reading("special_tokens_map.json"), edit("special_tokens_map.json", **changes))


# A prefix of pieces that a piece is shorter than, which the tokenizers package does not look at.
PANICS = {
    **{"type": "BPE", "continuing_subword_prefix": "####", "unk_token": None},
    **{"vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]},
}
ADDED = "tokenizer_config.json: added_tokens_decoder"
TOKENIZERS: list[Case] = [
    (said, way, said)
    for way, said in [
        (text("tokenizer.json", "{"), "tokenizer.json can't be read as a tokenizer: EOF while"),
        (text("tokenizer.json", DEEP), "tokenizer.json can't be read as a tokenizer: "),
        (edit("tokenizer.json", model=5), "tokenizer.json can't be read as a tokenizer: "),
        (edit("tokenizer.json", model=PANICS), "tokenizer.json can't be read as a tokenizer:"),
        *(
            (way, "additional_chat_templates is not a folder: expected a folder of chat templates")
            for way in (
                pipe("additional_chat_templates"),
                link("additional_chat_templates", "gone"),
                text("additional_chat_templates", "{{ messages }}"),
            )
        ),
        (added(["<x>"]), f"{ADDED} is ['<x>']: expected an object of tokens by their ids"),
        (added({"3": {"special": True}}), f"{ADDED}[3]: content is None: expected a string"),
        (added({"3": "<x>"}), f"{ADDED}[3] is '<x>': expected an object"),
        (added({"x": {"content": "<x>"}}), f"{ADDED} has the key 'x': expected a token's id"),
        (added({"\u0663": {"content": "<x>"}}), f"{ADDED} has the key '\u0663': expected a"),
        (added({"9" * 5000: {"content": "x"}}), f"{ADDED} has the key '9999"),
        (added({"3": {"content": "<x>", "special": "yes"}}), f"{ADDED}[3]: special is 'yes':"),
        (added({"9": {"content": "<x>"}}), "tokenizer_config.json gives '<x>' the id 9, but the"),
        (added({"3": {"content": "<x>"}, "4": {"content": "<x>"}}), "tokenizer_config.json gives"),
        *(
            (
                tokenizer_config(**{key: value}),
                f"tokenizer_config.json: {key} is {value!r}: expected",
            )
            for key, value in (("bos_token", 5), ("eos_token", {"text": "<s>"}))
        ),
        (map_of_tokens(eos_token=5), "special_tokens_map.json: eos_token is 5: expected a"),
        (tokenizer_config(extra_special_tokens="<x>"), "extra_special_tokens is '<x>': expected"),
        (tokenizer_config(extra_special_tokens=[5]), "extra_special_tokens[0] is 5: expected a"),
        (tokenizer_config(extra_special_tokens={"a": 5}), "extra_special_tokens['a'] is 5:"),
        *(
            (
                steps(without("chat_template.jinja"), tokenizer_config(chat_template=value)),
                f"tokenizer_config.json: chat_template is {value!r}: expected a string, or a",
            )
            for value in (5, [{"name": 1}])
        ),
        *(
            (
                edit("generation_config.json", eos_token_id=value),
                f"generation_config.json is {value!r}: expected an id or a list of ids",
            )
            for value in (96, [2, True], "</s>")
        ),
        (
            edit("generation_config.json", eos_token_id=None, text_config=[1]),
            "generation_config.json: text_config is [1]: expected an object",
        ),
    ]
]
