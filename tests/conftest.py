"""Settings of hypothesis and pytest for every test.

``make test`` runs the same examples everywhere (derandomized), so that a red test is red for everybody. A soak run looks
for new ones: ``EMBCACHE_SOAK=20 make test`` draws at random and multiplies the number of examples of the promises by 20.
No deadline, since machines are shared.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]

settings.register_profile("default", deadline=None, print_blob=True, derandomize=True, suppress_health_check=SLOW)
settings.register_profile("soak", deadline=None, print_blob=True, max_examples=1000, suppress_health_check=SLOW)
# What `tools/sanitize.sh` asks for: everything there is many times slower.
settings.register_profile(
    "few", deadline=None, print_blob=True, derandomize=True, max_examples=15, stateful_step_count=20
)
settings.load_profile("soak" if os.environ.get("EMBCACHE_SOAK") else "default")

# Where these are set, pytest lays out all differences of what a failed test compares: for lists of thousands that takes
# longer than the watchdog allows, and the report is a hang. What it says otherwise, the first difference, is enough.
for name in ("CI", "BUILD_NUMBER"):
    os.environ.pop(name, None)
