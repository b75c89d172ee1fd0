"""Sampling of the next token: settings, logits processors, draws, and random keys."""
