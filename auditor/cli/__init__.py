"""The command line: finds the verb, and turns whatever ends it into an exit code and one line."""

from .parsers import parser
from .program import main

__all__ = ["main", "parser"]
