"""Plain pictures of rectangles and short texts as PNG files, with the standard library alone."""

from __future__ import annotations

import struct
import zlib

Colour = tuple[int, int, int]
"""Red, green, blue; 0 to 255."""

WHITE: Colour = (255, 255, 255)

# A letter: the character, then its nine rows from the top. A row is a digit of base 32 whose bits are its five pixels,
# the left one the highest. Seven rows are above the baseline, two below it.
_LETTERS = """
    0ehjlphe00 14c4444e00 2eh168gv00 3eh161he00 426aiv2200 5vgu11he00 668guhhe00 7v12448800 8ehhehhe00
    9ehhf12c00 Aehhvhhh00 Buhhuhhu00 Cehggghe00 Duhhhhhu00 Evgguggv00 Fvgguggg00 Gehgnhhf00 Hhhhvhhh00
    Ie44444e00 J72222ic00 Khikokih00 Lggggggv00 Mhrllhhh00 Nhpljhhh00 Oehhhhhe00 Puhhuggg00 Qehhhlid00
    Ruhhukih00 Sfgge11u00 Tv44444400 Uhhhhhhe00 Vhhhhha400 Whhhllrh00 Xhha4ahh00 Yhha444400 Zv1248gv00
    a00e1fhf00 bgguhhhu00 c00eggge00 d11fhhhf00 e00ehvge00 f68u888800 g00fhhhf1e hgguhhhh00 i40c444e00
    j2062222ic kggikoki00 lc44444e00 m00qllll00 n00uhhhh00 o00ehhhe00 p00uhhhugg q00fhhhf11 r00moggg00
    s00fge1u00 t88u888600 u00hhhhf00 v00hhha400 w00hhlla00 x00ha4ah00 y00hhhhf1e z00v248v00 µ00hhhpmgg
    .00000cc00 ,00000cc48 %pp248jj00 -000u00000 _000000v00 :0cc0cc000 (248884200 )842224800 /11248gg00
    ?eh1240400
"""
_FONT = {letter[0]: [int(row, 32) for row in letter[1:]] for letter in _LETTERS.split()} | {" ": [0] * 9}
_COLUMNS, _LINE_ROWS = 6, 7
"""Columns of a letter, including the gap to the next, and its rows above the baseline."""


class Picture:
    """A picture to draw in; x goes to the right, y down."""

    def __init__(self, width: int, height: int, background: Colour = WHITE) -> None:
        self.width = width
        self.height = height
        self._rows = [bytearray(bytes(background) * width) for _ in range(height)]

    def rectangle(self, left: int, top: int, right: int, bottom: int, colour: Colour) -> None:
        """Fill up to, not including, `right` and `bottom`; parts outside the picture are cut off."""
        left, right = max(left, 0), min(right, self.width)
        if left < right:
            line = bytes(colour) * (right - left)
            for row in self._rows[max(top, 0) : max(bottom, 0)]:
                row[3 * left : 3 * right] = line

    def text(self, left: int, top: int, text: str, colour: Colour, *, size: int = 2) -> None:
        """Write a line of text; a letter's pixel is `size` x `size`, and unknown characters become question marks."""
        for place, character in enumerate(text):
            rows = _FONT.get(character, _FONT["?"])
            for y, bits in enumerate(rows):
                for x in range(5):
                    if bits >> (4 - x) & 1:
                        at_x, at_y = left + (place * _COLUMNS + x) * size, top + y * size
                        self.rectangle(at_x, at_y, at_x + size, at_y + size, colour)

    def png(self) -> bytes:
        """Return the picture as a PNG file (W3C Portable Network Graphics, 24-bit colour, rows unfiltered)."""

        def chunk(kind: bytes, data: bytes) -> bytes:
            return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

        header = struct.pack(">IIBBBBB", self.width, self.height, 8, 2, 0, 0, 0)
        pixels = zlib.compress(b"".join(b"\0" + row for row in self._rows), 9)
        return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def text_size(text: str, size: int = 2) -> tuple[int, int]:
    """Return width and height in pixels, without the rows below the baseline."""
    return (len(text) * _COLUMNS - 1) * size, _LINE_ROWS * size
