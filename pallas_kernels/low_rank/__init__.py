"""Changes of products by adapters of low rank, from which each row chooses one."""
