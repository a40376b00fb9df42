"""Bytes to bytes, pure."""
