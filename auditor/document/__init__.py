"""plan.json and measurements.json: written, read back, checked and compared."""
