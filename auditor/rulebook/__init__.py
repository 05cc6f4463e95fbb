"""Rules, the facts that their conditions use, verdicts based on measurements, and the comparison of rules with
verdicts."""
