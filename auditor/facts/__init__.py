"""What can be known of every node without running it low: NodeFacts, the only thing a rule's conditions see."""

from .gather import gather
from .table import FACTS, Fact, NodeFacts, value_at

__all__ = ["FACTS", "Fact", "NodeFacts", "gather", "value_at"]
