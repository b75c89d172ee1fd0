"""Registry of families: the class that implements each architecture of a config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mpjax.kernels.checks import shown
from mpjax.models.config import ConfigError
from mpjax.models.decoder import Decoder
from mpjax.models.gemma import Gemma, Gemma2, Gemma3
from mpjax.models.gpt_oss import GptOss
from mpjax.models.granite import Granite
from mpjax.models.llama import Llama
from mpjax.models.mistral import Mistral
from mpjax.models.mixtral import Mixtral
from mpjax.models.olmo import Olmo2
from mpjax.models.phi import Phi3
from mpjax.models.qwen import Qwen2, Qwen3
from mpjax.models.qwen_moe import Qwen2MoE, Qwen3MoE
from mpjax.models.smollm import SmolLM3

FAMILIES: dict[str, type[Decoder]] = {
    "GptOssForCausalLM": GptOss,
    "LlamaForCausalLM": Llama,
    "GemmaForCausalLM": Gemma,
    "Gemma2ForCausalLM": Gemma2,
    "Gemma3ForCausalLM": Gemma3,
    "GraniteForCausalLM": Granite,
    "Olmo2ForCausalLM": Olmo2,
    "Phi3ForCausalLM": Phi3,
    "SmolLM3ForCausalLM": SmolLM3,
    "MistralForCausalLM": Mistral,
    "MixtralForCausalLM": Mixtral,
    "Qwen2ForCausalLM": Qwen2,
    "Qwen2MoeForCausalLM": Qwen2MoE,
    "Qwen3ForCausalLM": Qwen3,
    "Qwen3MoeForCausalLM": Qwen3MoE,
}

_PLAIN_MLP = "norms that subtract the mean, and an MLP without a gate"
# Architectures that people ask for, and the part of each that the decoders here lack.
LACKING = {
    **dict.fromkeys(("Starcoder2ForCausalLM", "PhiForCausalLM", "GPTNeoXForCausalLM"), _PLAIN_MLP),
    **dict.fromkeys(("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"), "latent attention"),
    **dict.fromkeys(("MambaForCausalLM", "Mamba2ForCausalLM"), "state spaces for attention"),
}


def family(hf: Mapping[str, Any]) -> type[Decoder]:
    """The Decoder class for a Hugging Face `config.json`, by its `architectures`.

    Raises ConfigError, which names the architectures found and those supported.
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
        if name in FAMILIES:
            return FAMILIES[name]
    found = ", ".join(map(repr, names)) or f"none (model_type {hf.get('model_type')!r})"
    lacking = next((f", which has {LACKING[name]}" for name in names if name in LACKING), "")
    raise ConfigError(
        f"config.json: unsupported architecture: {found:.200}{lacking}; supported are "
        f"{', '.join(FAMILIES)}"
    )
