"""Adapter files: reads and writes PEFT folders, and reads MLX folders."""
