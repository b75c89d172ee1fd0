"""Attention over latents: one vector for each token serves as its keys and values (MLA).

Pages store it as keys, and as values a rotary part that belongs to the keys. All query heads use
the same latent, so that each cached byte is read once for all of them.
"""
