"""Places that keep named objects, all behind `core.ports.Tier` and all passing one contract suite."""
