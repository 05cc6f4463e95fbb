"""Watches real training, saves the step that fails as a capsule, and replays the capsule in every recipe on a CPU."""
