"""From the query-key-value product to attention: head norms, rotary embedding, append."""
