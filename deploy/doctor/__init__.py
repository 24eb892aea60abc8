"""What is wrong with a host, why it matters, and the command that mends it."""
