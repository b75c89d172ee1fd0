"""Measures a model: perplexity, KL divergence from another model, and lm_eval's tasks."""
