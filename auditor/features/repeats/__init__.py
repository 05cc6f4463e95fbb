"""Errors under the recommended plan over repeated calls: sampler steps, decoder layers, batches."""
