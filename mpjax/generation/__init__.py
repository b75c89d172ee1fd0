"""Generation: prompts to tokens, the decoding loop and its draws, and tokens to text."""
