"""The command line: one module a verb, and the program that finds the verb."""

from .program import main

__all__ = ["main"]
