"""The command line: parses and runs a command; a failure becomes an exit code, one error line and a hint."""

from .parsers import parser
from .program import main

__all__ = ["main", "parser"]
