"""The number in each row at which whole-number weights of the largest numbers reach a sum."""
