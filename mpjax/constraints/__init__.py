"""Constraints of generated text: grammars followed on the host, or tables on the device."""
