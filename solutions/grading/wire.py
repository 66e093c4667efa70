"""Plain data as bytes, and back: JSON, with the tensors' own bytes behind it. No pickle, and nothing is executed.

    a message   8 bytes, its length; 4 bytes, the length of the JSON; the JSON; the tensors' bytes
    a tensor    in the JSON: {"tensor": [dtype, shape, first byte]}; any other dict: {"dict": [[key, value], ...]}

What is read may come from anyone: every length is checked before memory is taken for it, and whatever is not as above
raises Malformed.
"""

import json
import math
import struct
from collections.abc import Callable

import torch
from torch import Tensor

LIMIT, JSON_LIMIT = 64 * 2**20, 8 * 2**20  # bytes of one message, and of its JSON
NUMBERS = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16)
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (*NUMBERS, torch.int8, torch.uint8, torch.bool)}


class Malformed(Exception):
    """These bytes are no message."""


def encode(value) -> bytes:
    """The message for a value: None, bool, int, float, str, Tensor, and lists and dicts (with str keys) of these.

    Raises Malformed for anything else, and where it is too long.
    """
    blobs, length = [], 0

    def packed(part):
        nonlocal length
        if isinstance(part, Tensor):
            name = str(part.dtype).removeprefix("torch.")
            if name not in DTYPES or part.layout != torch.strided:
                raise Malformed(f"a tensor of {part.dtype}, {part.layout}")
            tensor = part.detach().contiguous()
            blobs.append(tensor.view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b"")
            length += len(blobs[-1])
            return {"tensor": [name, list(tensor.shape), length - len(blobs[-1])]}
        if isinstance(part, dict):
            return {"dict": [[str(key), packed(inner)] for key, inner in part.items()]}
        if isinstance(part, list | tuple):
            return [packed(inner) for inner in part]
        if part is None or isinstance(part, bool | int | float | str):
            return part
        raise Malformed(f"a {type(part).__name__}")

    try:
        header = json.dumps(packed(value)).encode()
    except (RecursionError, ValueError, TypeError) as error:
        raise Malformed(str(error)) from None
    message = struct.pack("<I", len(header)) + header + b"".join(blobs)
    if len(message) > LIMIT or len(header) > JSON_LIMIT:
        raise Malformed("too much data")
    return struct.pack("<Q", len(message)) + message


def decode(message: bytes):
    """The value of a message, without the 8 bytes of its length. Raises Malformed."""
    try:
        (length,) = struct.unpack_from("<I", message)
        blob = bytearray(message[4 + length :])
        if length > min(len(message) - 4, JSON_LIMIT):
            raise Malformed("too much text, or cut short")
        return unpacked(json.loads(message[4 : 4 + length]), blob)
    except (struct.error, ValueError, TypeError, KeyError, RecursionError, RuntimeError, OverflowError) as error:
        raise Malformed(str(error)) from None


def unpacked(part, blob: bytearray):
    """The value that stands in the JSON as `part`."""
    if isinstance(part, list):
        return [unpacked(inner, blob) for inner in part]
    if isinstance(part, int) and abs(part) >= 2**63:
        raise Malformed("a number that is too large")
    if not isinstance(part, dict):
        return part
    if set(part) == {"dict"}:
        return {str(key): unpacked(inner, blob) for key, inner in part["dict"]}
    name, shape, first = part["tensor"]
    dtype, shape = DTYPES[name], [int(size) for size in shape]
    size = math.prod(shape)
    if min(shape, default=0) < 0 or first < 0 or first + size * dtype.itemsize > len(blob):
        raise Malformed("a tensor larger than its message")
    if not size:
        return torch.empty(shape, dtype=dtype)
    if dtype is torch.bool and any(byte > 1 for byte in blob[first : first + size]):
        raise Malformed("a bool that is neither 0 nor 1")
    return torch.frombuffer(blob, dtype=dtype, count=size, offset=first).view(shape).clone()


def read(receive: Callable[[int], bytes]):
    """The next message. receive(n) gives n bytes, fewer at the end. Raises EOFError at the end, or Malformed."""
    (length,) = struct.unpack("<Q", exactly(receive, 8))
    if length > LIMIT:
        raise Malformed("too much data")
    return decode(exactly(receive, length))


def exactly(receive: Callable[[int], bytes], count: int) -> bytes:
    """So many bytes. Raises EOFError if there are fewer."""
    found = bytearray()
    while len(found) < count:
        if not (more := receive(min(count - len(found), 2**20))):
            raise EOFError
        found += more
    return bytes(found)
