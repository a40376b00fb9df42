"""Doors for other libraries: each stands alone on the store and the capture of state, without a run. Imported by name, never by us."""
