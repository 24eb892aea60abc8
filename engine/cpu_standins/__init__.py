"""Folder put in front of `sys.path` on machines without a GPU; its packages stand in for CUDA-only ones."""
