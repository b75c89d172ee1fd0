"""Mixed-precision LLM inference in JAX: load a checkpoint, quantise it, generate.

    import mpjax

    lm = mpjax.load("Qwen3-8B-AWQ/", precision="W4A16KV8")
    print(mpjax.generate(lm, ["The capital of France is"], max_new_tokens=64).text[0])

JAX is imported when one of the names below is first used, so that `mpjax --help` starts fast.
"""

from __future__ import annotations

import importlib

from mpjax import floors

TYPE_CHECKING = False  # `import typing` would double the time that `import mpjax` takes
if TYPE_CHECKING:
    import mpjax.kernels as kernels
    import mpjax.models as models
    from mpjax.adapters.collection import Adapter
    from mpjax.adapters.training import lora
    from mpjax.checkpoint.adapters.folder import read_adapter
    from mpjax.checkpoint.adapters.merging import merge
    from mpjax.checkpoint.adapters.writing import save_adapter
    from mpjax.checkpoint.exporting import export
    from mpjax.checkpoint.naming import Rule, by_file_names
    from mpjax.checkpoint.saving import save
    from mpjax.constraints.automaton import Automaton
    from mpjax.constraints.kinds import Choice, Grammar, JsonObject, JsonSchema, Regex
    from mpjax.embedding.api import embed, score
    from mpjax.engine.call import Generation
    from mpjax.engine.engine import Engine
    from mpjax.engine.generate import TextPiece, generate, stream, stream_batch
    from mpjax.engine.handle import CancelledError, Event, Handle, PromptLogprobs
    from mpjax.engine.program_run import ProgramRun
    from mpjax.evaluation.comparison import Comparison, compare
    from mpjax.evaluation.perplexity import Evaluation, evaluate
    from mpjax.generation.decoding import GeneratedTokens, generate_tokens
    from mpjax.generation.speculation.draft import Draft
    from mpjax.generation.speculation.heads import MTP, Eagle
    from mpjax.generation.speculation.ngram import Ngram
    from mpjax.generation.speculation.report import SpeculationReport
    from mpjax.language_model import LanguageModel
    from mpjax.loading import bundled_model, load
    from mpjax.models import trainable
    from mpjax.precision import Precision
    from mpjax.quantization.api import quantize
    from mpjax.quantization.budget import BudgetRecipe, recipe_for_budget
    from mpjax.quantization.calibration import calibrate_cache
    from mpjax.quantization.learning.descent import Learning
    from mpjax.quantization.learning.model import learn_scales
    from mpjax.quantization.recipe import Recipe
    from mpjax.quantization.text import Calibration
    from mpjax.rollouts.logprobs import Mismatch, importance_weights, mismatch, token_logprobs
    from mpjax.rollouts.update import update
    from mpjax.sampling.processors import Processor
    from mpjax.sampling.settings import Sampling
    from mpjax.trainers.drafter import DrafterTraining, train_drafter

__version__ = "0.1.0"

floors.install()

__all__ = [
    "MTP",
    "Adapter",
    "Automaton",
    "BudgetRecipe",
    "Calibration",
    "CancelledError",
    "Choice",
    "Comparison",
    "Draft",
    "DrafterTraining",
    "Eagle",
    "Engine",
    "Evaluation",
    "Event",
    "GeneratedTokens",
    "Generation",
    "Grammar",
    "Handle",
    "JsonObject",
    "JsonSchema",
    "LanguageModel",
    "Learning",
    "Mismatch",
    "Ngram",
    "Precision",
    "Processor",
    "ProgramRun",
    "PromptLogprobs",
    "Recipe",
    "Regex",
    "Rule",
    "Sampling",
    "SpeculationReport",
    "TextPiece",
    "bundled_model",
    "by_file_names",
    "calibrate_cache",
    "compare",
    "embed",
    "evaluate",
    "export",
    "generate",
    "generate_tokens",
    "importance_weights",
    "kernels",
    "learn_scales",
    "load",
    "lora",
    "merge",
    "mismatch",
    "models",
    "quantize",
    "read_adapter",
    "recipe_for_budget",
    "save",
    "save_adapter",
    "score",
    "stream",
    "stream_batch",
    "token_logprobs",
    "train_drafter",
    "trainable",
    "update",
]

_MODULES = {
    "Adapter": "adapters.collection",
    "Automaton": "constraints.automaton",
    "BudgetRecipe": "quantization.budget",
    "Calibration": "quantization.text",
    "CancelledError": "engine.handle",
    "Choice": "constraints.kinds",
    "Comparison": "evaluation.comparison",
    "Draft": "generation.speculation.draft",
    "DrafterTraining": "trainers.drafter",
    "Eagle": "generation.speculation.heads",
    "Engine": "engine.engine",
    "Evaluation": "evaluation.perplexity",
    "Event": "engine.handle",
    "GeneratedTokens": "generation.decoding",
    "Generation": "engine.call",
    "Grammar": "constraints.kinds",
    "Handle": "engine.handle",
    "JsonObject": "constraints.kinds",
    "JsonSchema": "constraints.kinds",
    "LanguageModel": "language_model",
    "Learning": "quantization.learning.descent",
    "MTP": "generation.speculation.heads",
    "Mismatch": "rollouts.logprobs",
    "Ngram": "generation.speculation.ngram",
    "Precision": "precision",
    "Processor": "sampling.processors",
    "ProgramRun": "engine.program_run",
    "PromptLogprobs": "engine.handle",
    "Recipe": "quantization.recipe",
    "Regex": "constraints.kinds",
    "Rule": "checkpoint.naming",
    "Sampling": "sampling.settings",
    "SpeculationReport": "generation.speculation.report",
    "TextPiece": "engine.generate",
    "bundled_model": "loading",
    "by_file_names": "checkpoint.naming",
    "calibrate_cache": "quantization.calibration",
    "compare": "evaluation.comparison",
    "embed": "embedding.api",
    "evaluate": "evaluation.perplexity",
    "export": "checkpoint.exporting",
    "generate": "engine.generate",
    "generate_tokens": "generation.decoding",
    "importance_weights": "rollouts.logprobs",
    "kernels": "kernels",
    "learn_scales": "quantization.learning.model",
    "load": "loading",
    "lora": "adapters.training",
    "merge": "checkpoint.adapters.merging",
    "mismatch": "rollouts.logprobs",
    "models": "models",
    "quantize": "quantization.api",
    "read_adapter": "checkpoint.adapters.folder",
    "recipe_for_budget": "quantization.budget",
    "save": "checkpoint.saving",
    "save_adapter": "checkpoint.adapters.writing",
    "score": "embedding.api",
    "stream": "engine.generate",
    "stream_batch": "engine.generate",
    "token_logprobs": "rollouts.logprobs",
    "train_drafter": "trainers.drafter",
    "trainable": "models",
    "update": "rollouts.update",
}


if not TYPE_CHECKING:  # type checkers that saw it would accept misspelt names

    def __getattr__(name):
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = importlib.import_module(f"{__name__}.{_MODULES[name]}")
        value = module if _MODULES[name] == name else getattr(module, name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
