"""Plans for exported graphs: a precision for every operation, saved as programs that run without the model's code."""
