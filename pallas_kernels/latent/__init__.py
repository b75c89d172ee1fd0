"""Attention over latents: one vector for each token, which is its keys and its values (MLA).

Pages hold it as keys, and as values a part that is rotated and belongs to the keys alone. All query
heads read the same latent, so that each cached byte is read once for all of them.
"""
