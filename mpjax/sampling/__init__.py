"""How the next token is chosen: the settings, the draw, and a random key for each row and step."""
