"""A CPU as the target: the kernels that ran, plans under torch.compile, and plans for CUDA as well."""
