from collections.abc import Sequence

class Yardstick:
    variant: str
    threads: int
    def __init__(self, verb: str, bytes: int, splits: Sequence[float], ranks: int) -> None: ...
    def round(self, calls: int = 1, warmup: int = 1) -> float: ...
