"""The command line: parses the verb, runs it, and reports any failure as an exit code and one line."""

from .parsers import parser
from .program import main

__all__ = ["main", "parser"]
