from typing import final

@final
class Notice:
    number: int
    num_keys: int
    num_uniques: int
    @property
    def state(self) -> str: ...
