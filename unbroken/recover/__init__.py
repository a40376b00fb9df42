"""The trainer's half of starting, going on and saving: its line to the daemon, the plan carried out, snapshots, the journal."""
