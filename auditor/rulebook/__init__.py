"""The rules, the facts that their conditions see, the verdicts of the measurement, and each held against the other."""
