"""Findings of the rules, verdicts of the measurement, and each held against the other."""
