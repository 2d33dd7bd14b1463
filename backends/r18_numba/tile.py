"""The tile sizes of a register-tiled matrix product."""

from __future__ import annotations

from dataclasses import dataclass

SHARED_NBYTES = 48 * 1024
"""Static shared memory of a block, on every architecture."""


@dataclass(frozen=True)
class Tile:
    """C[m, n] += A[k, m]·B[k, n]: the tile of a block and of a thread.

    m, n:  rows and columns of a block. k: depth of one of the two stages in shared memory.
    rows, columns: the register tile of a thread. Its vectors are as far apart as all threads of the
                   block are wide, so a warp's loads from shared memory have no bank conflicts.
    registers: the most registers per thread; None leaves it to the compiler.
    vector: floats of a vector, or fewer if there are fewer rows or columns.
    """

    m: int
    n: int
    k: int
    rows: int
    columns: int
    registers: int | None = None
    vector: int = 4

    def __post_init__(self) -> None:
        if self.m % self.rows or self.n % self.columns:
            raise ValueError(f"{self}: threads do not cover the block")
        if self.rows % self.row_vector or self.columns % self.column_vector:
            raise ValueError(f"{self}: a thread's rows and columns are whole vectors")
        if self.threads % self.n or (self.k * self.m) % self.threads or self.k % self.row_step:
            raise ValueError(f"{self}: the threads do not fill a stage in whole rounds")
        if 2 * 4 * self.k * (self.m + self.n) > SHARED_NBYTES:
            raise ValueError(f"{self}: two stages do not fit in shared memory")

    @property
    def threads(self) -> int:
        return (self.m // self.rows) * (self.n // self.columns)

    @property
    def row_vector(self) -> int:
        return min(self.vector, self.rows)

    @property
    def column_vector(self) -> int:
        return min(self.vector, self.columns)

    @property
    def row_step(self) -> int:
        """Rows of B (of depth) that all threads load at a time."""
        return self.threads // self.n

    def __str__(self) -> str:
        return f"m{self.m}n{self.n}k{self.k}"


LARGE = Tile(128, 128, 8, 8, 8, registers=128)
WIDE = Tile(64, 128, 8, 8, 8, registers=128)
SMALL = Tile(32, 64, 8, 4, 4)
TINY = Tile(32, 4, 8, 4, 4, vector=2)
"""Eight threads, because each is a Python thread in the simulator. As in the large tiles, a thread
has several row and column vectors, and B is loaded in several steps."""

TILES = (LARGE, WIDE, SMALL, TINY)
