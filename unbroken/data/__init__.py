"""The data of a run: this rank's units of each step, in an order that does not depend on who loads them, and the place in it."""
