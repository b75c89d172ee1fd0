"""The operation between the QKV product and attention: QK-norm, RoPE, append to the cache."""
