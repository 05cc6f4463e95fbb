"""Records one real run of a Subject as a torch.fx graph of ATen operations, each with its module and source line."""
