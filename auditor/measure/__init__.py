"""What every operation does in every format, forwards and backwards, and how far that moves outputs and gradients."""
