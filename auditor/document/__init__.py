"""plan.json and measurements.json: written, read, validated and compared."""
