"""Settings of hypothesis: machines may be busy, so an example has no deadline; pytest has one."""

from hypothesis import settings

settings.register_profile("keptset", deadline=None)
settings.load_profile("keptset")
