"""Constraints: what a text may be, as grammars that a host follows or tables on the device."""
