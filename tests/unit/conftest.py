"""Settings of all unit tests."""

import signal

from hypothesis import settings

# Programs under test are interrupted; a shell that runs the tests in the background has them ignore that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# An example that takes long on a busy machine is no failure; where time matters a test measures it itself.
settings.register_profile("unit", deadline=None)
settings.load_profile("unit")
