"""Scheme combines the three parts of a checkpoint format: reading, writing and policy."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from mpjax.checkpoint.schemes import checks
from mpjax.checkpoint.schemes.reader import Reader
from mpjax.checkpoint.schemes.tensors import Specs
from mpjax.checkpoint.schemes.writing import Writing
from mpjax.errors import CheckpointError


class Rule(NamedTuple):
    """The reader of the modules that match targets.

    targets: full names, patterns (`re:…`), or `Linear` for all modules. reader: None if the modules
    were left in 16 bits. key: the rule's name in config.json, for messages.
    """

    targets: tuple[str, ...]
    reader: Reader | None
    key: str = ""


@dataclasses.dataclass(frozen=True)
class Scheme:
    """The format in which checkpoints store their quantised linear maps.

    A scheme is one file, and one line in `registry.SCHEMES`.

    title: the format's name in messages. article: the article before the name.
    methods: values of `quant_method` in config.json.
    reader: the class that decodes modules.
    read: converts a `quantization_config` to rules, the first match of which counts, or to one
        reader of all modules. Modules left in 16 bits need no rule, since their tensors show that.
        Raises CheckpointError for unsupported settings.
    matches: whether a `quantization_config` is of this format; None: if it names one of `methods`.
    refuse: raises CheckpointError for a module with this format if config.json names another; if it
        returns, `refuse_module` raises.
    ignored: suffixes of tensor names that a checkpoint may have and that are not read.
    dequantizes_tables: whether quantised embeddings and heads are allowed, and dequantised.
    writing: how modules are exported; None if the format is only read.
    """

    title: str
    methods: tuple[str, ...]
    reader: type[Reader]
    read: Callable[[Mapping[str, Any]], Reader | Sequence[Rule]]
    article: str = "a"
    matches: Callable[[Mapping[str, Any]], bool] | None = None
    refuse: Callable[[str, Specs, str | None], None] | None = None
    ignored: tuple[str, ...] = ()
    dequantizes_tables: bool = False
    writing: Writing | None = None

    def is_of(self, config: Mapping[str, Any]) -> bool:
        """Whether a `quantization_config` is of this format."""
        if self.matches is not None:
            return self.matches(config)
        return checks.method_of(config) in self.methods

    def refuse_module(self, name: str, specs: Specs, method: str | None) -> NoReturn:
        """Raises CheckpointError: the module has this format, and config.json names another.

        name: of the module. method: the `quant_method` of config.json, None without one.
        """
        if self.refuse is not None:
            self.refuse(name, specs, method)
        said = (
            f"has no quantization_config with quant_method {' or '.join(map(repr, self.methods))}"
        )
        if method in self.methods:
            said = f"says quant_method {method!r} with another format"
        raise CheckpointError(
            f"{name} is {self.article} {self.title} module ({', '.join(specs)}), but config.json "
            f"{said}: take the config.json of the same checkpoint"
        )
