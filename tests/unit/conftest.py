"""Settings of all unit tests."""

from hypothesis import settings

# An example that takes long on a busy machine is no failure; where time matters a test measures it itself.
settings.register_profile("unit", deadline=None)
settings.load_profile("unit")
