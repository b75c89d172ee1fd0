"""Writing files: free disk space, atomic replacement, and JSON in messages."""
