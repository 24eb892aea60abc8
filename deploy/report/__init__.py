"""A bug report that can be shown to strangers."""
