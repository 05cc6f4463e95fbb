"""A program in the place of the model that it was made of, for code that was written for the model."""

from __future__ import annotations

from typing import Any

from torch import nn


class Standing(nn.Module):
    """Calls a program. What the model returns in a class of its own has its names here: as attributes, keys and in order."""

    def __init__(self, program: nn.Module) -> None:
        super().__init__()
        self.program = program

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the program returns."""
        output = self.program(*args, **kwargs)
        return Named(output) if type(output) is dict else output

    def train(self, mode: bool = True) -> Standing:
        """Nothing: a program is what it was exported as, and torch lets nobody switch it."""
        return self


class Named(dict[Any, Any]):
    """Outputs by name, as most classes of outputs have them."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"the program has no output {name!r}: {', '.join(map(str, self))}") from None

    def __getitem__(self, key: Any) -> Any:
        by_place = isinstance(key, slice) or (isinstance(key, int) and key not in self.keys())
        return list(self.values())[key] if by_place else super().__getitem__(key)
