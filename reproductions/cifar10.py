"""CIFAR-10 from ``FEDHET_DATA`` for the released code of others."""

from __future__ import annotations

from pathlib import Path

from fedhet.tasks.sources.arrays import Split
from fedhet.tasks.sources.encodings import ImageEncoding
from fedhet.tasks.sources.store import decode_once
from fedhet.tasks.sources.tables import ParquetTable, SourceColumns, TableDecoder

CLASSES, SIZE = 10, 32  # pixels


def read_cifar10(folder: Path, split: str) -> Split:
    """Read ``folder/SPLIT.parquet``: images (n, 3, 32, 32) as bytes, and labels (n,).

    The decoded pixels are kept in fedhet's cache.
    """
    table = ParquetTable((folder / f"{split}.parquet",), SourceColumns("img", "label"), CLASSES)
    decoder = TableDecoder(table, ImageEncoding((3, SIZE, SIZE)))
    return decode_once(f"cifar10-released-{split}", decoder)
