"""Settings of hypothesis for the whole repository."""

from hypothesis import HealthCheck, settings

# Two shared cores: how long an example takes says nothing, and a slow draw is no fault.
settings.register_profile("keptset", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("keptset")
