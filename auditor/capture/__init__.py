"""Capture: one real run of a Subject becomes a torch.fx graph of ATen operations, each with its owner and source line."""
