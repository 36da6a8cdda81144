"""Settings of hypothesis for every test: no deadline (machines are shared), the same examples on each run in CI."""

from __future__ import annotations

import os

from hypothesis import settings

settings.register_profile("default", deadline=None, print_blob=True)
settings.register_profile("ci", deadline=None, print_blob=True, derandomize=True)
settings.register_profile(
    "few", deadline=None, print_blob=True, derandomize=True, max_examples=15, stateful_step_count=20
)
settings.load_profile("ci" if os.environ.get("CI") else "default")
