"""Plans for exported graphs: a precision for every operation, saved as programs that run without the source."""

from .stage import Planned, graphs_of

__all__ = ["Planned", "graphs_of"]
