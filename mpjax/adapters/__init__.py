"""LoRA adapters of a language model, which requests choose by name."""
