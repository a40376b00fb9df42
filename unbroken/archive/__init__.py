"""Checkpoints without a run: reading what is stored, and writing as the only writer of a folder. No torch."""
