"""Property tests here are quick, but the machine may be busy: no example fails for the time it took."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("pure", deadline=None)
settings.load_profile("pure")
