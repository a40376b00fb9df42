"""The node daemon's half of a run: memory slots, what to start from, making snapshots durable. No torch."""
