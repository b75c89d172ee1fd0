"""Generation on arrays: prefill, the decoding step and its loop, and speculative decoding."""
