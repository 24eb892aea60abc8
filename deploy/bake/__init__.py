"""What the first GPU host compiled, for all others: warmed up, taken out of the cache, kept beside the image."""
