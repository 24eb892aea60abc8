"""The engine image: what decides it, and how it is built."""
