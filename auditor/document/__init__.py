"""Writes, reads, validates and compares plan.json and measurements.json."""
