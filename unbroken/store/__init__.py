"""The only durable truth: chunks in packs, manifests, the log, the journal, the lease on a run folder, garbage collection, verification."""
