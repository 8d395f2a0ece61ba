"""Images from bytes, files and folders: the pixels that Pillow reads, in the order of torchvision's `ImageFolder`."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs
import pytest
import torch

from orchestray.platform.data.draws import SampleDraws
from orchestray.platform.data.images import IMAGE_SUFFIXES, decode_images, image_folder
from orchestray.platform.errors import DataError, TaskError
from support.pictures import CLASSES, folder_of_pictures, picture, pixels_of


def walked(folder: Path) -> list[tuple[str, int]]:
    """Return paths and labels as torchvision's `make_dataset` finds them."""
    found = []
    for label, name in enumerate(sorted(entry.name for entry in os.scandir(folder) if entry.is_dir())):
        for root, _, files in sorted(os.walk(folder / name, followlinks=True)):
            found += [(f"{root}/{file}", label) for file in sorted(files) if file.lower().endswith(IMAGE_SUFFIXES)]
    return found


@pytest.fixture(params=[1, 3])
def threads(request: Any) -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("kind", ["bytes", "paths", "structs"])
def test_pixels_are_pillow_s_in_the_order_of_the_rows(tmp_path: Path, kind: str) -> None:
    contents = [picture(number, form="JPEG" if number % 2 else "PNG") for number in range(7)]
    paths = [tmp_path / f"{number}.img" for number in range(7)]
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content)
    column = {
        "bytes": pa.chunked_array([contents[:3], contents[3:]]),
        "paths": pa.array(map(str, paths)),
        "structs": pa.array(
            [
                {"bytes": c, "path": None} if i < 3 else {"bytes": None, "path": str(paths[i])}
                for i, c in enumerate(contents)
            ]
        ),
    }[kind]
    found = decode_images(column)
    assert (found.dtype, found.shape) == (torch.uint8, (7, 3, 20, 24))
    assert np.array_equal(found.numpy(), np.stack([pixels_of(content) for content in contents]))


def test_an_image_is_converted_to_the_mode_asked_for() -> None:
    assert decode_images(pa.array([picture(1)]), mode="L").shape == (1, 1, 20, 24)
    assert decode_images(pa.array([picture(1)]), mode="RGBA").shape == (1, 4, 20, 24)


def encoded(values: Any, kind: str) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(np.asarray(values)).save(file, kind)
    return file.getvalue()


def test_images_of_more_than_8_bits_keep_their_contrast_or_are_refused() -> None:
    wide = np.array([[0, 256, 40_000, 65_535]], np.uint16)
    assert decode_images(pa.array([encoded(wide, "PNG")]), mode="L").tolist() == [[[[0, 1, 156, 255]]]]
    small = encoded(np.array([[0, 200]], np.int32), "TIFF")
    assert decode_images(pa.array([small]), mode="L").tolist() == [[[[0, 200]]]]
    for values in (np.array([[0.0, 0.5]], np.float32), wide.astype(np.int32), -wide.astype(np.float32)):
        with pytest.raises(DataError, match="pixels of 32 bits must be from 0 to 255"):
            decode_images(pa.array([encoded(values, "TIFF")]))
    assert decode_images(pa.array([encoded(wide, "PNG")]), mode="F").dtype == torch.float32


@pytest.mark.usefixtures("threads")
def test_a_change_gets_image_and_generator_and_may_return_a_tensor() -> None:
    def change(image: Any, draws: np.random.Generator) -> torch.Tensor:
        return torch.tensor([image.size[0], draws.random(), torch.rand(()).item()])

    column = pa.array([picture(number) for number in range(6)])
    runs = [decode_images(column, change, SampleDraws(np.arange(6), seed=1, epoch=0)) for _ in range(2)]
    assert torch.equal(*runs)
    assert len(set(runs[0][:, 1].tolist())) == len(set(runs[0][:, 2].tolist())) == 6
    assert runs[0][:, 0].tolist() == [24] * 6


def test_images_of_different_sizes_are_refused_with_advice() -> None:
    column = pa.array([picture(1), picture(2, (8, 9))])
    with pytest.raises(
        DataError, match=r"column 'photo' holds images of different sizes, \[3, 9, 8\] and \[3, 20, 24\]"
    ):
        decode_images(column, name="photo")
    assert decode_images(column, lambda image: image.resize((5, 4))).shape == (2, 3, 4, 5)


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (b"no image", "cannot decode row 1 of a batch: it is no image that Pillow knows"),
        (picture(1, (400, 400))[:-900], "cannot decode row 1 of a batch: .*truncated"),
        (None, "has a null in row 1 of a batch"),
    ],
    ids=["no image", "cut", "null"],
)
def test_what_is_no_whole_image_is_named(value: Any, sentence: str) -> None:
    with pytest.raises(DataError, match=f"column 'image'.* {sentence}"):
        decode_images(pa.array([picture(1), value]))


def test_a_file_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=rf"cannot read {tmp_path}/gone.png: .*No such file"):
        decode_images(pa.array([f"{tmp_path}/gone.png"]))


def test_a_folder_is_listed_as_torchvision_lists_it(tmp_path: Path) -> None:
    for name in (
        "dog/b.PNG",
        "dog/a.jpg",
        "dog/in/z.png",
        "dog/in-2/y.png",
        "cat/1.webp",
        "cat/10.jpeg",
        "cat/notes.txt",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "readme.jpg").write_bytes(b"")
    table, classes = image_folder(str(tmp_path))
    assert classes == ["cat", "dog"]
    assert list(zip(table["image"].to_pylist(), table["label"].to_pylist(), strict=True)) == walked(tmp_path)


def test_a_folder_on_another_filesystem_is_listed_and_read(tmp_path: Path) -> None:
    folder_of_pictures(tmp_path / "set", 6)
    files = pafs.SubTreeFileSystem(str(tmp_path), pafs.LocalFileSystem())
    table, classes = image_folder("set/", filesystem=files)
    assert classes == list(CLASSES)
    found = decode_images(table["image"], filesystem=files)
    assert np.array_equal(found[0].numpy(), pixels_of(picture(0)))


@pytest.mark.parametrize("folders", [[], ["cat"]])
def test_a_folder_without_images_is_refused(tmp_path: Path, folders: list[str]) -> None:
    for name in folders:
        (tmp_path / name).mkdir()
    with pytest.raises(TaskError, match="no image in .*/cat: wanted" if folders else "no folder of a class in"):
        image_folder(str(tmp_path))
    with pytest.raises(TaskError, match="no folder of a class in"):
        image_folder(str(tmp_path / "absent"))
