"""Files of adapters: reads and writes PEFT's folders, and reads those of MLX."""
