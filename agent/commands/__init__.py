"""The `dsprobe` command: one module per verb. Nothing imports this package."""
