"""Plans of quantization schemes, with the fewest bits per weight within the error budget, and their code for libraries."""
