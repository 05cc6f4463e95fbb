"""Number formats, rounding, error metrics and the arithmetic of one operation in a format."""
