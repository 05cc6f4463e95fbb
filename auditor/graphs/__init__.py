"""Plans as graphs: every operation of an exported graph with a precision of its own, saved as files that run by themselves."""

from .stage import Planned, graphs_of

__all__ = ["Planned", "graphs_of"]
