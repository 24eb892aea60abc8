"""deploy.lock: every input of the stack by hash."""
