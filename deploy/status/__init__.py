"""What the running stack does, and why it is as fast as it is."""
