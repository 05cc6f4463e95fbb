"""Training: where a loss comes from, which scales and formats a step lives with, and what to do about it."""
