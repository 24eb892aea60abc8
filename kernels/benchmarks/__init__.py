"""Timing on a GPU: one script an op, each printing one table; see README.md."""
