"""Writing files: room on a disk, replacing a file as a whole, and JSON."""
