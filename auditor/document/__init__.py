"""plan.json: written, read back, checked and compared."""
