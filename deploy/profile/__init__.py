"""Where the time of a step goes: captures profiler traces, reads them, compares two."""
