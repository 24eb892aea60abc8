"""What the host is: the probe, the parsers it feeds and the report they fill."""
