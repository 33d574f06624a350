"""Property tests draw the same cases every time, whatever machine they run on."""

from hypothesis import settings

settings.register_profile("same cases", derandomize=True, deadline=None, database=None)
settings.load_profile("same cases")
