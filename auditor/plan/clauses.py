"""Clauses that say why something is not low, worded once."""

from __future__ import annotations

import math

GAINS = {"time": "time", "memory": "memory", "flops": "FP32 FLOPs"}
"""{objective: what a plan saves}."""


ALONE = "lowering it alone"
"""How a clause begins that is about one module and not about all of which it is said."""

_NOT_ALL = "; not all of which this is said can be low together"


def count(number: int, noun: str) -> str:
    """`1 module`, `3 modules`."""
    return f"{number:,} {noun if number == 1 else noun + 's'}"


def apart(*values: float) -> tuple[str, ...]:
    """The values in two significant digits, or in as many more as it takes to tell those apart that differ."""
    for digits in range(2, 6):
        texts = tuple(f"{value:.{digits}g}" for value in values)
        if len(set(texts)) == len(set(values)):
            break
    return texts


def gained(saves: float, objective: str) -> str:
    """What lowering something gains, a share; nothing where it would cost."""
    if saves <= 0:
        return f"saves no {GAINS[objective]}"
    return f"saves {'less than 0.1%' if saves < 0.0005 else f'{saves:.1%}'} of the {GAINS[objective]}"


def no_gain(saves: float, objective: str, scopes: int, least: float, *, alone: bool = False) -> str:
    """Why what could be low is not.

    scopes: how many more there would be; least: the share that these must save; alone: not all that gains nothing holds
    the budget when it is low together.
    """
    what, rest = (ALONE, _NOT_ALL) if alone else ("lowering it", "")
    if saves <= 0:
        return f"{what} {gained(saves, objective)}{rest}"
    more = "one more scope in the plan must save" if scopes <= 1 else f"{scopes} more scopes in the plan must save"
    return f"{what} {gained(saves, objective)}, where {more} {max(least, 0.001):.1%}{rest}"


def little(saves: float, objective: str, *, alone: bool = False) -> str:
    """The same of many that each save something. saves: the most."""
    what, rest = (ALONE, _NOT_ALL) if alone else ("lowering it", "")
    return f"{what} {_at_most(gained(saves, objective))}, less than the scopes that it adds to the plan must save{rest}"


def _at_most(clause: str) -> str:
    return clause if "less than" in clause else clause.replace("saves ", "saves at most ", 1)


def over(before: float, after: float, budget: float, saves: float, objective: str, ran: bool) -> str:
    """Why what would gain something is not lowered: the budget."""
    if not math.isfinite(after):
        return "low, it makes the model fail or its outputs non-finite"
    first, second, allowed = apart(before, after, budget)
    how = (
        f"takes the error from {first} to {second}"
        if ran
        else f"is predicted to take the error from {first} to {second}"
    )
    left = f"{max(budget - before, 0.0):.2g} of the budget of {allowed} is left"
    return f"lowering it {how}, and {gained(saves, objective)}; {left}"


def close(before: float, after: float, budget: float, target: float, ran: bool) -> str:
    """Why what stays within the budget is not lowered: other inputs."""
    first, second, share = apart(before, after, target)
    verb = ("takes", "leaves") if ran else ("is predicted to take", "is predicted to leave")
    moved = f"{verb[0]} the error from {first} to {second}" if first != second else f"{verb[1]} the error at {first}"
    if after <= target:
        return f"lowering it alone {moved}; low together with what else could be, the plan was better by less than 1%, if at all"
    return (
        f"lowering it {moved}, within the budget of {budget:.2g}, of which this plan was made to use {share}: other inputs "
        f"deserve some room"
    )
