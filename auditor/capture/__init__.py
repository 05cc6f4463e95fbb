"""Records one run of a model as a torch.fx graph of ATen operations, with the module and source line of each."""
