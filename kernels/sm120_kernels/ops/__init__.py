"""Launch functions: one module an op."""
