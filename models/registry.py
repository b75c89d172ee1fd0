"""Registry of families: architecture in config.json → class that implements it."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from mpjax.kernels.checks import did_you_mean, nearest, shown
from mpjax.models.apertus import Apertus
from mpjax.models.cohere import Cohere, Cohere2, Cohere2MoE
from mpjax.models.config import ConfigError, DecoderConfig
from mpjax.models.config_json import integer
from mpjax.models.config_keys import DEFAULTS
from mpjax.models.decoder import Decoder
from mpjax.models.deepseek import DeepseekV2, DeepseekV3, DeepseekV32, Glm4MoELite, Mistral4
from mpjax.models.dots import Dots1
from mpjax.models.ernie import Ernie45, Ernie45MoE
from mpjax.models.exaone import Exaone4
from mpjax.models.falcon import FalconH1
from mpjax.models.gemma import Gemma, Gemma2, Gemma3
from mpjax.models.gemma3n import Gemma3n
from mpjax.models.gemma4 import Gemma4
from mpjax.models.glm import Glm4, Glm4MoE
from mpjax.models.gpt_oss import GptOss
from mpjax.models.granite import Granite
from mpjax.models.granite_hybrid import GraniteHybrid
from mpjax.models.granite_moe import GraniteMoE
from mpjax.models.hunyuan import HunYuan, HunYuanMoE
from mpjax.models.kimi import KimiLinear
from mpjax.models.lfm2 import Lfm2, Lfm2MoE
from mpjax.models.llama import Llama
from mpjax.models.llama4 import Llama4
from mpjax.models.minimax import MiniMaxM2
from mpjax.models.mistral import Ministral3, Mistral
from mpjax.models.mixtral import Mixtral
from mpjax.models.muse import MuseGlimmer
from mpjax.models.nemotron import NemotronH
from mpjax.models.olmo import Olmo2, Olmo3, OlmoHybrid
from mpjax.models.phi import Phi3, PhiMoE
from mpjax.models.qwen import Qwen2, Qwen3
from mpjax.models.qwen_hybrid import Qwen3Next, Qwen35, Qwen35MoE
from mpjax.models.qwen_moe import Qwen2MoE, Qwen3MoE
from mpjax.models.seed_oss import SeedOss
from mpjax.models.smollm import SmolLM3
from mpjax.models.starcoder import Starcoder2

FAMILIES: dict[str, type[Decoder]] = {
    "GptOssForCausalLM": GptOss,
    "LlamaForCausalLM": Llama,
    "Llama4ForCausalLM": Llama4,
    "GemmaForCausalLM": Gemma,
    "Gemma2ForCausalLM": Gemma2,
    "Gemma3ForCausalLM": Gemma3,
    "Gemma3nForCausalLM": Gemma3n,
    "Gemma4ForCausalLM": Gemma4,
    "FalconH1ForCausalLM": FalconH1,
    "GraniteForCausalLM": Granite,
    "GraniteMoeHybridForCausalLM": GraniteHybrid,
    "KimiLinearForCausalLM": KimiLinear,
    "Lfm2ForCausalLM": Lfm2,
    "Lfm2MoeForCausalLM": Lfm2MoE,
    "MuseGlimmerForCausalLM": MuseGlimmer,
    "NemotronHForCausalLM": NemotronH,
    "Olmo2ForCausalLM": Olmo2,
    "Phi3ForCausalLM": Phi3,
    "PhimoeForCausalLM": PhiMoE,
    "PhiMoEForCausalLM": PhiMoE,
    "SmolLM3ForCausalLM": SmolLM3,
    "MistralForCausalLM": Mistral,
    "MixtralForCausalLM": Mixtral,
    "Qwen2ForCausalLM": Qwen2,
    "Qwen2MoeForCausalLM": Qwen2MoE,
    "Qwen3ForCausalLM": Qwen3,
    "Qwen3MoeForCausalLM": Qwen3MoE,
    "Starcoder2ForCausalLM": Starcoder2,
    "ApertusForCausalLM": Apertus,
    "CohereForCausalLM": Cohere,
    "Cohere2ForCausalLM": Cohere2,
    "Cohere2MoeForCausalLM": Cohere2MoE,
    "Glm4ForCausalLM": Glm4,
    "Glm4MoeForCausalLM": Glm4MoE,
    "Glm4MoeLiteForCausalLM": Glm4MoELite,
    "Mistral4ForCausalLM": Mistral4,
    "Ernie4_5ForCausalLM": Ernie45,
    "Ernie4_5_MoeForCausalLM": Ernie45MoE,
    "Exaone4ForCausalLM": Exaone4,
    "SeedOssForCausalLM": SeedOss,
    "MiniMaxM2ForCausalLM": MiniMaxM2,
    "DeepseekV2ForCausalLM": DeepseekV2,
    "DeepseekV3ForCausalLM": DeepseekV3,
    "DeepseekV32ForCausalLM": DeepseekV32,
    "Dots1ForCausalLM": Dots1,
    "Olmo3ForCausalLM": Olmo3,
    "OlmoHybridForCausalLM": OlmoHybrid,
    "GraniteMoeForCausalLM": GraniteMoE,
    "GraniteMoeSharedForCausalLM": GraniteMoE,
    "HunYuanDenseV1ForCausalLM": HunYuan,
    "HunYuanMoEV1ForCausalLM": HunYuanMoE,
    "Ministral3ForCausalLM": Ministral3,
    "Qwen3NextForCausalLM": Qwen3Next,
    "Qwen3_5ForCausalLM": Qwen35,
    "Qwen3_5MoeForCausalLM": Qwen35MoE,
}

CHECKED_WITH = "5.24"  # the version of transformers whose logits the families match
# Keys that many families have, or that change no computation.
COMMON = (
    *("architectures", "model_type", "auto_map", "transformers_version", "torch_dtype", "dtype"),
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim"),
    *("num_attention_heads", "num_key_value_heads", "attention_bias", "mlp_bias", "rope_theta"),
    *("rope_scaling", "rope_parameters", "quantization_config", "initializer_range", "use_cache"),
    *("eos_token_id", "bos_token_id", "pad_token_id", "attention_dropout", "pretraining_tp"),
    *("_name_or_path", "id2label", "label2id"),
)
# Suffixes of architectures with a family's layers, besides `ForCausalLM`.
CLASSIFIER, BARE = "ForSequenceClassification", "Model"
_PARALLEL = "two norms that both read a layer's input"
# Architectures that people ask for → what the decoders here lack for them.
LACKING = {
    **dict.fromkeys(("PhiForCausalLM", "GPTNeoXForCausalLM"), _PARALLEL),
    **dict.fromkeys(("MambaForCausalLM", "Mamba2ForCausalLM"), "state spaces for attention"),
}


def causal(name: str) -> str:
    """The architecture of the causal language model with the layers of a classifier or bare model.

    Of `Qwen3ForSequenceClassification` and `Qwen3Model` it is `Qwen3ForCausalLM`; any other name is
    returned unchanged.
    """
    for ending in (CLASSIFIER, BARE):
        if name.endswith(ending):
            return f"{name.removesuffix(ending).removesuffix('Text')}ForCausalLM"
    return name


def families() -> dict[str, type[Decoder]]:
    """The families' classes by their names in lower case, which `mpjax.load` takes."""
    return {kind.__name__.lower(): kind for kind in FAMILIES.values()}


def table_lines() -> Iterator[str]:
    """The Markdown lines of the table of families in docs/families.md."""
    yield "| family | `architectures` in config.json | what it is |"
    yield "| --- | --- | --- |"
    for name, kind in sorted(families().items()):
        own = ", ".join(f"`{key}`" for key, found in FAMILIES.items() if found is kind)
        about = " ".join((inspect.getdoc(kind) or "").partition("\n\n")[0].split())
        yield f"| `{name}` | {own} | {about} |"


def taken_for(hf: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The `config.json` with its architecture replaced by a family's.

    name: of the family or of one of its architectures. Raises ValueError for an unknown name.
    """
    found = families().get(name.lower(), FAMILIES.get(name)) if isinstance(name, str) else None
    if found is None:
        near = did_you_mean(nearest(str(name).lower(), sorted(families())))
        raise ValueError(
            f"family is {shown(name)}{near}: expected one of {', '.join(sorted(families()))}"
        )
    architecture = next(key for key, kind in FAMILIES.items() if kind is found)
    return {**hf, "architectures": [architecture]}


def unknown_keys(hf: Mapping[str, Any], decoder: type[Decoder]) -> list[str]:
    """The keys of a `config.json` that are unknown to the family and not common to all, sorted.

    A key is known if the family refuses an invalid value of it.
    """
    known = {*COMMON, *DEFAULTS, *decoder.defaults, *decoder.neutral, *decoder.aliases}

    def is_read(key: str) -> bool:
        try:
            decoder.config_from_hf({**hf, key: object()})
        except ConfigError:
            return True
        return False

    others = (key for key, value in hf.items() if key not in known and value is not None)
    return sorted(key for key in others if not is_read(key))


def read_config(hf: Mapping[str, Any]) -> tuple[type[Decoder], DecoderConfig]:
    """The class and the configuration for a `config.json`; see `family` and `config_from_hf`.

    The number of a classifier's labels is that of names in `id2label`, else num_labels or 2.
    """
    decoder = family(hf)
    config = decoder.config_from_hf(hf)
    if not hf["architectures"][0].endswith(CLASSIFIER):
        return decoder, config
    names = hf.get("id2label")
    if names is not None and not (isinstance(names, Mapping) and names):
        raise ConfigError(f"config.json: id2label is {shown(names)}: expected an object of names")
    given = integer(hf, "num_labels", 2)
    labels = given if names is None else len(names)
    fields: dict[str, Any] = {"labels": labels, "predicts": False, "tie_word_embeddings": True}
    return decoder, dataclasses.replace(config, **fields)


def family(hf: Mapping[str, Any]) -> type[Decoder]:
    """The Decoder class for a Hugging Face `config.json`, by its `architectures`.

    Raises ConfigError, which names the architectures found and the supported families.
    """
    if not isinstance(hf, Mapping):
        raise ConfigError(f"config.json is {shown(hf)}: expected an object")
    names = hf.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(
            f"config.json: architectures is {names!r:.80}: expected a list of names, such as "
            f"{[*FAMILIES][:1]}"
        )
    for name in names:
        if (found := FAMILIES.get(name) or FAMILIES.get(causal(name))) is not None:
            return found
    said = ", ".join(map(repr, names)) or f"none (model_type {hf.get('model_type')!r})"
    lacking = next((f", which has {LACKING[name]}" for name in names if name in LACKING), "")
    raise ConfigError(
        f"config.json: unsupported architecture: {said:.200}{lacking}; supported are "
        f"{', '.join(sorted(families()))}"
    )
