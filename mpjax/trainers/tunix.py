"""A rollout engine for Tunix, whose samples a packed model makes (`pip install google-tunix`)."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mpjax.checkpoint.naming import Rule, by_file_names
from mpjax.engine.engine import Engine
from mpjax.kernels.checks import require_type
from mpjax.language_model import LanguageModel
from mpjax.models import Decoder
from mpjax.rollouts.logprobs import token_logprobs
from mpjax.sampling.settings import Sampling

try:
    from tunix.rl.rollout.base_rollout import BaseRollout, RolloutConfig, RolloutOutput
except ImportError as error:
    raise ImportError(
        f"mpjax.trainers.tunix needs Tunix: pip install google-tunix ({error})"
    ) from error


class TunixRollout(BaseRollout):
    """Samples for Tunix's learners, from an Engine of a language model.

        lm = mpjax.load("Qwen3-8B/", precision="W4A16KV16")
        ClusterConfig(rollout_engine=functools.partial(TunixRollout, lm=lm), ...)

    Tunix makes it with rollout_actor, the trainer's model; tokenizer, a TokenizerAdapter; mesh; and
    rollout_config. `lm` gets the actor's weights at once and after each step of the trainer, and is
    on its own device.

    names: of the actor's weights, as for `mpjax.by_file_names`. engine: keyword arguments of the
    Engine, such as slots.

    Raises ValueError for weights that `lm` has no place for.
    """

    def __init__(
        self,
        *,
        rollout_actor: Any,
        tokenizer: Any,
        rollout_config: RolloutConfig,
        lm: LanguageModel,
        names: str | Sequence[Rule] = "tunix",
        engine: dict[str, Any] | None = None,
        mesh: jax.sharding.Mesh | None = None,
    ):
        require_type("lm", lm, LanguageModel, hint=", as mpjax.load gives it")
        self._lm, self._tokenizer, self._names = lm, tokenizer, names
        most = rollout_config.max_prompt_length + rollout_config.max_tokens_to_generate
        self._engine = Engine(lm, **{"max_tokens": most, **(engine or {})})
        self._calls = 0
        self.update_params(rollout_actor)

    def generate(
        self, prompts: list[str], rollout_config: RolloutConfig, **_: Any
    ) -> RolloutOutput:
        """Completes prompts. Prompts are cut on the left to max_prompt_length tokens.

        Log-probabilities, if asked for, are those of the logits divided by the temperature, as the
        trainer computes them: without top-k and top-p.
        """
        most = rollout_config.max_prompt_length
        read = [self._encode(prompt)[-most:] for prompt in prompts]
        top_p, top_k = rollout_config.top_p, rollout_config.top_k
        stops = tuple(rollout_config.eos_tokens or (self.eos_id(),))
        sampling = Sampling(
            temperature=rollout_config.temperature,
            top_p=None if top_p is None or top_p >= 1 else top_p,
            top_k=None if top_k is None or top_k < 1 else top_k,
            stop_ids=stops,
        )
        seeds = self._seeds(rollout_config.seed, len(prompts))
        handles = [
            self._engine.submit(
                ids,
                max_new_tokens=rollout_config.max_tokens_to_generate,
                sampling=sampling,
                seed=seed,
            )
            for ids, seed in zip(read, seeds, strict=True)
        ]
        tokens = [np.array(handle.result().tokens, np.int32) for handle in handles]
        padded = np.full((len(read), most), self.pad_id(), np.int32)
        for row, ids in enumerate(read):
            padded[row, most - len(ids) :] = ids
        logprobs = None
        if rollout_config.return_logprobs:
            logprobs = self._logprobs(padded, tokens, rollout_config)
        return RolloutOutput(
            text=[self._decode(row.tolist(), stops) for row in tokens],
            logits=None,
            tokens=tokens,
            left_padded_prompt_tokens=padded,
            logprobs=logprobs,
        )

    def get_per_token_logps(
        self, prompt_tokens: jax.Array, completion_tokens: jax.Array
    ) -> jax.Array:
        """The log-probability of each token of the completions, float32 [batch, tokens].

        prompt_tokens: padded on the left. completion_tokens: padded on the right.
        """
        return _completion_logprobs(
            self._lm.for_device, prompt_tokens, completion_tokens, self.pad_id(), 1.0
        )

    def update_params(self, params: Any, filter_types: tuple[Any, ...] | None = None) -> None:
        """Takes the trainer's weights, rounded to the formats of the packed model.

        Raises ValueError for adapters alone, which the packed model has no place for.
        """
        if filter_types is not None and nnx.LoRAParam in filter_types:
            raise ValueError(
                f"filter_types are {filter_types}: a packed model takes all weights, not adapters: "
                "train without adapters"
            )
        with jax.transfer_guard("allow"):  # the largest values are read, to be checked
            self._engine.update_weights(by_file_names(params, self._names))

    def _encode(self, prompt: str) -> list[int]:
        """The ids of a prompt, with one bos if the tokenizer has one."""
        first = self._tokenizer.bos_id()
        ids = [*([first] if first else []), *self._tokenizer.encode(prompt)]
        return [int(one) for one in self._tokenizer.dedup_bos_ids(ids)]

    def _decode(self, ids: list[int], stops: tuple[int, ...]) -> str:
        """The text of new tokens, without the one that ended it."""
        return str(self._tokenizer.decode(ids[:-1] if ids[-1:] and ids[-1] in stops else ids))

    def _seeds(self, seed: Any, count: int) -> jax.Array:
        """A key for each row. seed: a key or an integer; None for new keys in each call."""
        self._calls += 1
        seed = self._calls if seed is None else seed
        is_typed = jnp.issubdtype(getattr(seed, "dtype", int), jax.dtypes.prng_key)
        is_key = is_typed or jnp.ndim(seed) > 0
        return jax.random.split(seed if is_key else jax.random.key(seed), count)

    def _logprobs(
        self, prompts: np.ndarray, tokens: Sequence[np.ndarray], config: RolloutConfig
    ) -> list[np.ndarray]:
        """The log-probabilities of the new tokens of each row.

        Rows are padded to the most new tokens, so that one program serves all calls.
        """
        width, temperature = config.max_tokens_to_generate, config.temperature or 1.0
        completions = np.full((len(tokens), width), self.pad_id(), np.int32)
        for row, ids in enumerate(tokens):
            completions[row, : len(ids)] = ids
        model = self._lm.for_device
        found = _completion_logprobs(model, prompts, completions, self.pad_id(), temperature)
        return [row[: len(ids)] for row, ids in zip(np.asarray(found), tokens, strict=True)]

    def pad_id(self) -> int:
        """The id of padding."""
        return int(self._tokenizer.pad_id())

    def eos_id(self) -> int:
        """The id that ends a text."""
        return int(self._tokenizer.eos_id())

    def model(self) -> None:
        """None: Tunix would take the weights of a model to the host, and the engine needs them."""
        return None


@functools.partial(jax.jit, static_argnames=("pad", "temperature"))
def _completion_logprobs(
    model: Decoder, prompts: jax.Array, completions: jax.Array, pad: int, temperature: float
) -> jax.Array:
    """The log-probabilities of completions [batch, tokens] after prompts padded on the left."""
    rows = jnp.concatenate([prompts, completions], 1)
    before = jnp.argmax(prompts != pad, 1)  # padding
    columns = jnp.arange(rows.shape[1])[None] + before[:, None]
    tokens = jnp.take_along_axis(rows, columns % rows.shape[1], 1)
    found = token_logprobs(model, tokens, rows.shape[1] - before, temperature=temperature)
    first = prompts.shape[1] - before - 1
    own = jnp.arange(completions.shape[1])[None] + first[:, None]
    return jnp.take_along_axis(found, own, 1)
