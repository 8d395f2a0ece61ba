"""Small pictures in folders and tables."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pyarrow as pa
from PIL import Image

CLASSES = ("cat", "dog", "eel")


def picture(number: int, size: tuple[int, int] = (24, 20), form: str = "PNG") -> bytes:
    """Return an encoded picture [height, width], unlike any other, and brighter by class."""
    width, height = size
    pixels = np.random.default_rng(number).integers(0, 80, (height, width, 3), dtype=np.uint8)
    pixels += np.uint8(80 * (number % len(CLASSES)))
    into = io.BytesIO()
    Image.fromarray(pixels).save(into, form)
    return into.getvalue()


def pixels_of(content: bytes) -> np.ndarray:
    """Return the pixels of a picture, [3, height, width]."""
    found: np.ndarray = np.array(Image.open(io.BytesIO(content)).convert("RGB")).transpose(2, 0, 1)
    return found


def table_of_pictures(num_rows: int) -> pa.Table:
    """Return a table of pictures, their class and their number."""
    numbers = range(num_rows)
    return pa.table(
        {
            "image": [picture(number) for number in numbers],
            "label": [CLASSES[number % len(CLASSES)] for number in numbers],
            "number": list(numbers),
        }
    )


def folder_of_pictures(folder: Path, num_pictures: int) -> Path:
    """Write pictures into a folder for each class, and return the folder."""
    for number in range(num_pictures):
        place = folder / CLASSES[number % len(CLASSES)]
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{number:03}.png").write_bytes(picture(number))
    return folder
