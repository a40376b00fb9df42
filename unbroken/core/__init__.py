"""Nouns without logic: records, errors, limits and ports. No I/O, no torch, nothing above it."""
