"""Embeddings of texts, and scores of classifiers and rerankers."""
