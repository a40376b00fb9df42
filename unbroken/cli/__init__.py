"""The commands: one file each, no logic, views over the same records as `unbroken.open()`. rich for people, `--json` for machines."""
