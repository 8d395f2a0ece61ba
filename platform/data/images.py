"""Images from encoded bytes or from files, decoded by several threads.

Pillow decodes them. It reads every format that torchvision's `ImageFolder` reads, to the same values. Its wheel fits
every build of torch, which that of `torchvision.io` does not.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs
import torch
from torch import Tensor

from orchestray.platform.data.draws import TorchDraws
from orchestray.platform.data.retries import STOP, read_patiently
from orchestray.platform.errors import DataError, TaskError

if TYPE_CHECKING:
    import threading

    from PIL import Image

    from orchestray.platform.data.tensors import Column

Change: TypeAlias = "Callable[..., Image.Image | Tensor]"

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
"""Ends of the names of files that are images, the same as those of torchvision's `ImageFolder`."""


def image_folder(folder: str, *, filesystem: pafs.FileSystem | None = None) -> tuple[pa.Table, list[str]]:
    """List the images of a folder that has a folder for each class, as torchvision's `ImageFolder` does.

    Args:
        folder: path of the folder.
        filesystem: filesystem that has it; None: the local one.

    Returns:
        A table with the columns `image` (path) and `label` (int64), sorted by class and path; and the classes' names,
        sorted.

    Raises:
        TaskError: there is no such folder, no folder of a class in it, or no image in one of them.
    """
    files = filesystem or pafs.LocalFileSystem()
    root = str(folder).rstrip("/") or "/"
    selector = pafs.FileSelector(root, recursive=True, allow_not_found=True)
    infos = read_patiently(lambda: files.get_file_info(selector), root)
    images: dict[str, list[tuple[str, ...]]] = {}
    for info in infos:
        parts = PurePosixPath(info.path).relative_to(root).parts
        if info.type == pafs.FileType.Directory and len(parts) == 1:
            images.setdefault(parts[0], [])
        elif info.type == pafs.FileType.File and len(parts) > 1 and parts[-1].lower().endswith(IMAGE_SUFFIXES):
            images.setdefault(parts[0], []).append(parts)
    if not images:
        raise TaskError(f"there is no folder of a class in {root}: wanted {root}/CLASS/IMAGE.jpg")
    if empty := sorted(name for name, found in images.items() if not found):
        raise TaskError(
            f"there is no image in {root}/{empty[0]}: wanted files that end with {', '.join(IMAGE_SUFFIXES)}"
        )
    classes = sorted(images)
    # Folder by folder: the folders in the order of their paths, then the names in each.
    ordered = [sorted(images[name], key=lambda parts: ("/".join(parts[:-1]), parts[-1])) for name in classes]
    paths = [f"{root}/{'/'.join(parts)}" for found in ordered for parts in found]
    labels = np.repeat(np.arange(len(classes)), [len(found) for found in ordered])
    return pa.table({"image": paths, "label": labels}), classes


def decode_images(
    column: Column,
    change: Change | None = None,
    draws: Sequence[np.random.Generator] | None = None,
    *,
    mode: str = "RGB",
    filesystem: pafs.FileSystem | None = None,
    name: str = "image",
) -> Tensor:
    """Return images as one tensor, [rows, channels, height, width], uint8, decoded by as many threads as torch uses.

    Args:
        column: encoded images (bytes), paths of files, or structs with `bytes` and `path`, of which either may be null.
        change: called with each image (`PIL.Image`), and with its generator if there are `draws`; returns an image, or
            a tensor of any type and shape. It runs in the threads that decode. torch's random functions in it draw
            from the image's generator, and so do the transforms of torchvision.
        draws: generators of the rows, which a task's `to_training_batch` gets; None: nothing may be drawn.
        mode: mode of Pillow that each image is converted to: "RGB", "L", ...
        filesystem: filesystem of the paths; None: the local one.
        name: name of the column, for errors.

    Raises:
        DataError: an image cannot be read or decoded, or they differ in size.
        TaskError: Pillow is not installed.
    """
    rows = column.to_pylist()
    decode = functools.partial(_decode, change=change, mode=mode, filesystem=filesystem, name=name, stop=STOP.get())
    generators = [None] * len(rows) if draws is None else draws
    num_threads = min(torch.get_num_threads(), len(rows))
    if num_threads > 1:
        found = list(_pool(torch.get_num_threads()).map(decode, range(len(rows)), rows, generators))
    else:
        found = [decode(*each) for each in zip(range(len(rows)), rows, generators, strict=True)]
    sizes = {tuple(image.shape) for image in found}
    if len(sizes) > 1:
        first, second = sorted(sizes)[:2]
        raise DataError(
            f"column '{name}' holds images of different sizes, {list(first)} and {list(second)}: make them alike by "
            "decode_images(column, change), for example with change=lambda image: image.resize((224, 224))"
        )
    return torch.stack(found) if found else torch.zeros(0, len(mode), 0, 0, dtype=torch.uint8)


@functools.cache
def _pool(num_threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(num_threads, "decode-images")


def _decode(
    row: int,
    value: Any,
    draws: np.random.Generator | None,
    *,
    change: Change | None,
    mode: str,
    filesystem: pafs.FileSystem | None,
    name: str,
    stop: threading.Event | None,
) -> Tensor:
    image_module = _pillow()
    STOP.set(stop)  # of the thread that waits for this one
    if isinstance(value, dict):
        value = value.get("path") if value.get("bytes") is None else value["bytes"]
    place = value if isinstance(value, str) else f"row {row} of a batch"
    if value is None:
        raise DataError(f"column '{name}' has a null in {place}: drop the row")
    content = read_patiently(functools.partial(_content, value, filesystem), place) if isinstance(value, str) else value
    try:
        with image_module.open(io.BytesIO(content)) as opened:
            image = (opened if mode[0] in "IF" else _of_8_bits(opened)).convert(mode)
    except (OSError, ValueError, SyntaxError, image_module.DecompressionBombError) as error:
        reason = "it is no image that Pillow knows" if isinstance(error, image_module.UnidentifiedImageError) else error
        raise DataError(f"column '{name}': cannot decode {place}: {reason}. Is it whole?") from error
    changed: Any = image
    if change is not None and draws is not None:
        with TorchDraws(draws):
            changed = change(image, draws)
    elif change is not None:
        changed = change(image)
    return changed if isinstance(changed, Tensor) else _as_tensor(changed)


def _of_8_bits(image: Any) -> Any:
    """Return an image whose pixels are from 0 to 255; Pillow would cut them off there.

    Raises:
        ValueError: nothing says what range its pixels have.
    """
    if image.mode.startswith("I;16"):
        return _pillow().fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        low, high = image.getextrema()
        if low < 0 or high > 255 or (image.mode == "F" and 0 < high <= 1):
            raise ValueError(f"pixels of 32 bits must be from 0 to 255, and these are from {low:g} to {high:g}")
    return image


def _content(path: str, filesystem: pafs.FileSystem | None) -> bytes:
    with (filesystem or pafs.LocalFileSystem()).open_input_file(path) as file:
        content: bytes = file.read()
        return content


def _as_tensor(image: Any) -> Tensor:
    """Return an image as [channels, height, width]."""
    pixels = torch.from_numpy(np.array(image))
    return pixels.unsqueeze(0) if pixels.dim() == 2 else pixels.permute(2, 0, 1).contiguous()


@functools.cache
def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise TaskError("images are decoded by Pillow, which is not here: pip install 'orchestray[images]'") from error
    return Image
