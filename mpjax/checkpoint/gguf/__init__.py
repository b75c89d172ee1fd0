"""Reads GGUF files: a model in one file, with its configuration, its tokenizer and its weights.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""
