"""Results of `mpjax bench`, and the scripts that write docs/benchmarks.md from them."""
