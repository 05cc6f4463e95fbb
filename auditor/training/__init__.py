"""Training steps, for the features that run one: recorded, replayed, run in low precision, and traced to the first Inf or NaN."""
