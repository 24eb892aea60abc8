"""Definitions: the same functions in float64 torch, one module an op."""
