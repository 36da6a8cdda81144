"""The compiled core: no torch, no Python objects in loops."""
