"""What is measured of a machine: sizes, and how long each case is repeated."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MeasuredSizes:
    """MeasuredSizes of all measurements; the defaults are those of a CPU."""

    seconds: float = 0.02
    rows: tuple[int, ...] = (32, 64, 128, 256, 512, 2048)
    matrices: tuple[tuple[int, int], ...] = ((128, 128), (384, 384), (768, 768), (1536, 1024))
    evicting_bytes: int = 64 << 20
    cycled: tuple[int, int, int] = (32, 384, 384)
    cycled_bytes: tuple[int, ...] = (1 << 21, 1 << 22, 1 << 23, 1 << 24, 1 << 25, 1 << 26)
    operators: tuple[tuple[int, int], ...] = ((32, 256), (128, 384), (512, 512), (1024, 1024))
    seqs: tuple[int, ...] = (32, 64, 128, 256, 512)
    heads: tuple[int, int] = (4, 4)
    vocabulary: int = 256
    prepared: tuple[int, ...] = (128, 512, 1024)
    updated: tuple[int, ...] = (100_000, 1_000_000, 8_000_000)
    copied_bytes: tuple[int, ...] = (1 << 16, 1 << 20, 1 << 23, 1 << 26)
    message_bytes: tuple[int, ...] = (1 << 12, 1 << 16, 1 << 20)
    sum_bytes: tuple[int, ...] = (1 << 16, 1 << 20, 1 << 23, 1 << 25)
    fused: tuple[tuple[int, int], ...] = ((64, 256), (128, 512), (512, 512), (1024, 768))

    @property
    def references(self) -> tuple[tuple[int, int, int], ...]:
        """Rows, columns and inner size of products that tell how fast a machine is at the moment: three of the file's.

        Three, since one figure of a file, or of a visit, may have been disturbed.
        """
        rows, (middle, large) = self.rows, self.matrices[2:4]
        return ((rows[-3], *middle), (rows[-2], *middle), (rows[-2], *large))


# Of a GPU: larger.
GPU = MeasuredSizes(
    rows=(64, 512, 2048, 8192),
    matrices=((1024, 1024), (2048, 2048), (8192, 2048), (8192, 8192)),
    evicting_bytes=512 << 20,
    cycled=(128, 1024, 1024),
    cycled_bytes=(1 << 23, 1 << 24, 1 << 25, 1 << 26, 1 << 27, 1 << 28),
    operators=((512, 1024), (2048, 2048), (8192, 4096)),
    seqs=(256, 1024, 2048, 4096),
    # Enough for every processor, in groups as llama_1b's; a table and logits that are no small change beside a launch.
    heads=(32, 8),
    vocabulary=1 << 15,
    updated=(1_000_000, 100_000_000),
    copied_bytes=(1 << 20, 1 << 26, 1 << 29),
)


def sizes_of(device: str) -> MeasuredSizes:
    """Return the sizes of cpu or cuda."""
    return GPU if device == "cuda" else MeasuredSizes()


# Of a look that takes seconds: rough, but what a model of a handful of features meets.
QUICK = MeasuredSizes(
    seconds=0.0,
    rows=(32, 256),
    matrices=((128, 128), (384, 384)),
    evicting_bytes=1 << 22,
    cycled=(32, 128, 128),
    cycled_bytes=(1 << 18, 1 << 20),
    operators=((32, 256), (128, 384)),
    seqs=(32, 128),
    prepared=(128,),
    updated=(100_000,),
    copied_bytes=(1 << 16, 1 << 22),
    message_bytes=(1 << 12, 1 << 18),
    sum_bytes=(1 << 16, 1 << 20),
    fused=((64, 256), (128, 384)),
)
# (tokens of all ranks, width) of fused products that such a look times.
TINY_TIMED = ((64, 128),)

# Of a test.
TINY = MeasuredSizes(
    seconds=0.0,
    rows=(4, 8),
    matrices=((8, 8), (16, 8)),
    evicting_bytes=4,
    cycled=(4, 8, 8),
    cycled_bytes=(512, 1024),
    operators=((4, 8), (8, 16)),
    seqs=(4, 8),
    heads=(2, 2),
    vocabulary=16,
    prepared=(8,),
    updated=(64,),
    copied_bytes=(64, 256),
    message_bytes=(64, 256),
    sum_bytes=(64, 256),
    fused=((4, 8), (8, 16)),
)
