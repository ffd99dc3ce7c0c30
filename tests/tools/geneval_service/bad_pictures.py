"""Pictures that a reward service may be sent, the good ones encoded and the bad ones forged."""

import io
import struct
import zlib

from train.reward_wire import encode_jpeg


def encoded(picture, form="PNG"):
    buffer = io.BytesIO()
    picture.save(buffer, format=form)
    return buffer.getvalue()


def huge_png(side):
    """A PNG of a few bytes whose header says side x side."""
    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    chunks = b""
    for kind, data in ((b"IHDR", header), (b"IDAT", zlib.compress(b"\0")), (b"IEND", b"")):
        chunks += struct.pack(">I", len(data)) + kind + data
        chunks += struct.pack(">I", zlib.crc32(kind + data))
    return b"\x89PNG\r\n\x1a\n" + chunks


def huge_jpeg(picture, side):
    """A JPEG whose header says side x side."""
    data = bytearray(encode_jpeg(picture, 75))
    start = data.index(b"\xff\xc0") + 5
    data[start : start + 4] = struct.pack(">HH", side, side)
    return bytes(data)
