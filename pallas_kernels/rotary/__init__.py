"""The operation between the query-key-value product and attention: norms, rotation, append."""
