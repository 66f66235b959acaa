"""Mutants."""


def install(name: str) -> None:
    pass
