"""Decoding steps of recurrent layers: one token of each row, with states updated in place."""
