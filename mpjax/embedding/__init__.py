"""Text embeddings, and scores of classifiers and rerankers."""
