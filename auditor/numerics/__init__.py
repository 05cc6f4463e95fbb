"""Number formats, devices, rounding, error metrics, and emulation of a GPU's arithmetic for every ATen operation."""
