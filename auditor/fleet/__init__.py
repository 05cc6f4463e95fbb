"""Audits many models in parallel, each in its own process, and writes one page about all of them."""
