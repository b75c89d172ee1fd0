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
    from mpjax.calibration import calibrate_cache
    from mpjax.checkpoint.exporting import export
    from mpjax.checkpoint.saving import save
    from mpjax.comparison import Comparison, compare
    from mpjax.decoding import GeneratedTokens, generate_tokens
    from mpjax.engine.engine import Engine
    from mpjax.engine.handle import CancelledError, Event, Handle, PromptLogprobs
    from mpjax.engine.program_run import ProgramRun
    from mpjax.evaluation import Evaluation, evaluate
    from mpjax.generation import Generation, TextPiece, generate, stream, stream_batch
    from mpjax.language_model import LanguageModel
    from mpjax.loading import bundled_model, load
    from mpjax.models import trainable
    from mpjax.precision import Precision
    from mpjax.quantization.api import Calibration, quantize
    from mpjax.quantization.budget import BudgetRecipe, recipe_for_budget
    from mpjax.quantization.learning.descent import Learning
    from mpjax.quantization.learning.model import learn_scales
    from mpjax.quantization.recipe import Recipe
    from mpjax.sampling import Sampling
    from mpjax.speculation.draft import Draft
    from mpjax.speculation.ngram import Ngram
    from mpjax.speculation.report import SpeculationReport

__version__ = "0.1.0"

floors.install()

__all__ = [
    "BudgetRecipe",
    "Calibration",
    "CancelledError",
    "Comparison",
    "Draft",
    "Engine",
    "Evaluation",
    "Event",
    "GeneratedTokens",
    "Generation",
    "Handle",
    "LanguageModel",
    "Learning",
    "Ngram",
    "Precision",
    "ProgramRun",
    "PromptLogprobs",
    "Recipe",
    "Sampling",
    "SpeculationReport",
    "TextPiece",
    "bundled_model",
    "calibrate_cache",
    "compare",
    "evaluate",
    "export",
    "generate",
    "generate_tokens",
    "kernels",
    "learn_scales",
    "load",
    "models",
    "quantize",
    "recipe_for_budget",
    "save",
    "stream",
    "stream_batch",
    "trainable",
]

_MODULES = {
    "BudgetRecipe": "quantization.budget",
    "Calibration": "quantization.api",
    "CancelledError": "engine.handle",
    "Comparison": "comparison",
    "Draft": "speculation.draft",
    "Engine": "engine.engine",
    "Evaluation": "evaluation",
    "Event": "engine.handle",
    "GeneratedTokens": "decoding",
    "Generation": "generation",
    "Handle": "engine.handle",
    "LanguageModel": "language_model",
    "Learning": "quantization.learning.descent",
    "Ngram": "speculation.ngram",
    "Precision": "precision",
    "ProgramRun": "engine.program_run",
    "PromptLogprobs": "engine.handle",
    "Recipe": "quantization.recipe",
    "Sampling": "sampling",
    "SpeculationReport": "speculation.report",
    "TextPiece": "generation",
    "bundled_model": "loading",
    "calibrate_cache": "calibration",
    "compare": "comparison",
    "evaluate": "evaluation",
    "export": "checkpoint.exporting",
    "generate": "generation",
    "generate_tokens": "decoding",
    "kernels": "kernels",
    "learn_scales": "quantization.learning.model",
    "load": "loading",
    "models": "models",
    "quantize": "quantization.api",
    "recipe_for_budget": "quantization.budget",
    "save": "checkpoint.saving",
    "stream": "generation",
    "stream_batch": "generation",
    "trainable": "models",
}


if not TYPE_CHECKING:  # a checker that saw it would accept misspelt names

    def __getattr__(name):
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = importlib.import_module(f"{__name__}.{_MODULES[name]}")
        value = module if _MODULES[name] == name else getattr(module, name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
