"""Memory that outlives a trainer: slots, and the local socket between trainers, launcher and daemon."""
