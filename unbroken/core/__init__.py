"""Nouns without logic: records, messages, errors, limits, ports; and `os.py`, the one place of OS-specific calls."""
