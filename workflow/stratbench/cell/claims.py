"""What a strategy or policy claims of itself, which one that is made from it does not inherit."""

from __future__ import annotations


def disown(cls: type, claims: tuple[str, ...]) -> None:
    """Undo what the class, just made, has inherited of `claims` from a class with a `summary`.

    Whoever has a `summary` is a whole one. Made from another, it has the claims that it states itself, and
    else those of its bases that are none: a claim must be made for the class that it is true of.
    """
    if not is_whole(cls) or not any(map(is_whole, cls.__mro__[1:])):
        return
    for claim in claims:
        if claim not in vars(cls):
            stated = (vars(c)[claim] for c in cls.__mro__ if claim in vars(c) and not is_whole(c))
            setattr(cls, claim, next(stated))


def is_whole(cls: type) -> bool:
    """Whether the class has a `summary` of its own, as each in a registry has."""
    return "summary" in vars(cls)
