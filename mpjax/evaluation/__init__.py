"""Measuring a model: perplexity, KL divergence from another model, and tasks of lm_eval."""
