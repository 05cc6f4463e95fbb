"""Plans for exported graphs: a precision for every operation, saved as programs that run without the source."""

from .stage import GraphPlans, graphs_of

__all__ = ["GraphPlans", "graphs_of"]
