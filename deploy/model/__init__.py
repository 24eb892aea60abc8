"""Model folders: the tiny generated model of the CPU profile."""
