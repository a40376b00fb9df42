"""Digests of bytes, pure: leaf, piece, state root, rank root."""
