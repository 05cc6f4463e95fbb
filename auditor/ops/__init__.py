"""What every ATen operation is, and what the stages ask of a torch.fx node."""
