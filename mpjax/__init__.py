"""Mixed-precision LLM inference in JAX: load a checkpoint, quantise it, generate."""

__version__ = "0.1.0"
