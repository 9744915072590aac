"""Fake TPU devices for tests of meshes."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Chip:
    """Fake a TPU chip for a mesh: two slices of four chips each, in a square."""

    platform: str
    id: int
    device_kind: str = "TPU v4"
    core_on_chip: int = 0

    @property
    def slice_index(self) -> int:
        return self.id % 2

    @property
    def process_index(self) -> int:
        return self.id % 2

    @property
    def coords(self) -> tuple[int, int, int]:
        place = self.id // 2
        return (place % 2, place // 2, 0)
