"""What every operation does in every format, and how far its error moves the outputs."""
