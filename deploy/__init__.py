"""Controller: moves a host from one locked state to the next."""
