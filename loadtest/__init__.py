"""Load tests against the streaming endpoint."""
