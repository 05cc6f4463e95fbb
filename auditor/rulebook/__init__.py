"""Rules, the facts that their conditions use, the verdicts of the measurement, and the comparison of rules with
verdicts."""
