"""One training step as a transaction: units set aside, gradients reduced in unit order, the update applied by all ranks or by none."""
