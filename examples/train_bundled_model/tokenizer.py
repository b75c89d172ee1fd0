"""The bundled model's tokeniser: byte-level BPE whose pieces suit Python source.

The format is Hugging Face's `tokenizer.json`, written by the `tokenizers` package, beside a
`tokenizer_config.json` from which `transformers.AutoTokenizer` loads the same tokeniser.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from examples.train_bundled_model.corpus import BUNDLED, Document

VOCABULARY_SIZE = 2048
END_OF_TEXT = "<|endoftext|>"  # id 0; begins the token stream and ends every document

# BPE never merges across these pieces. A line break goes with the indentation after it, so a
# block's depth is one token and the first word of a line is spelt as it is anywhere else.
# Brackets, dots and line breaks stay apart from words: `os.`, `print(` and `def f():` are then
# whole tokens, which is how people end a prompt. Digits stand alone, so numbers are spelt out.
PIECES = "|".join(
    (
        r"\n[\n ]*",  # line breaks and the indentation that follows
        r" ?_*\p{L}[\p{L}_]*",  # a word or snake_case name, with the space before it
        r"\p{N}",  # one digit
        r" ?[^\s\p{L}\p{N}]+",  # operators and punctuation
        r" +",
        r"\s",
    )
)


def train(texts: Iterable[str], vocabulary_size: int = VOCABULARY_SIZE) -> Tokenizer:
    """Byte-level BPE [Sennrich et al. 2016] learned from `texts`, deterministically.

    All 256 bytes are in the vocabulary, so every string encodes and decodes to itself.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path = BUNDLED) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json` into `folder`."""
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,  # it would eat spaces before punctuation
    }
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def load(folder: Path = BUNDLED) -> Tokenizer:
    """The tokeniser that `save` wrote into `folder`."""
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def token_stream(tokenizer: Tokenizer, documents: Iterable[Document]) -> NDArray[np.uint16]:
    """All documents' tokens as one uint16 array [tokens].

    End-of-text stands at the start and after every document, so each document has one on both
    sides.
    """
    end_of_text = tokenizer.token_to_id(END_OF_TEXT)
    tokens = [end_of_text]
    for document in documents:
        tokens += tokenizer.encode(document.text).ids
        tokens.append(end_of_text)
    return np.array(tokens, dtype=np.uint16)
