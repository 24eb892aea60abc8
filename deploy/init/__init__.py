"""From what a host is to what it should run."""
