"""Plain data as bytes, and back: JSON, with the tensors' own bytes behind it. No pickle, and nothing is executed.

    a message   8 bytes, its length; 4 bytes, the length of the JSON; the JSON; the tensors' bytes
    a tensor    in the JSON: {"tensor": [dtype, shape, first byte]}; any other dict: {"dict": [[key, value], ...]}

What is read may come from anyone: every length is checked before memory is taken for it, and whatever is not as above
raises Malformed.
"""

import json
import struct
from collections.abc import Callable

import torch
from torch import Tensor

LIMIT, JSON_LIMIT, DIMENSIONS = 64 * 2**20, 8 * 2**20, 8  # bytes of a message, and of its JSON; of a tensor
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
        if length > min(len(message) - 4, JSON_LIMIT):
            raise Malformed("too much text, or cut short")
        return unpacked(json.loads(message[4 : 4 + length]), Blob(message[4 + length :]))
    except (struct.error, ValueError, TypeError, KeyError, RecursionError, RuntimeError) as error:
        raise Malformed(f"{type(error).__name__} {str(error)[:60]}") from None


class Blob:
    """The bytes of a message's tensors, each of which is read once, in their order: so no message can be small and its
    value large.
    """

    def __init__(self, data: bytes):
        self.data, self.read = bytearray(data), 0

    def tensor(self, name: str, shape: list, first: int) -> Tensor:
        """The tensor of this type and shape that begins at `first`."""
        dtype, size = DTYPES[name], 1
        if len(shape) > DIMENSIONS or first != self.read:
            raise Malformed("a tensor of many dimensions, or out of order")
        for length in shape:
            if type(length) is not int or not 0 <= length <= LIMIT:
                raise Malformed("no size of a tensor")
            size *= length
        self.read += size * dtype.itemsize
        if self.read > len(self.data):
            raise Malformed("a tensor larger than its message")
        if not size:
            return torch.empty(shape, dtype=dtype)
        stored = torch.uint8 if dtype is torch.bool else dtype
        values = torch.frombuffer(self.data, dtype=stored, count=size, offset=first).view(shape)
        if dtype is torch.bool and values.max() > 1:
            raise Malformed("a bool that is neither 0 nor 1")
        return values.to(dtype, copy=True)


def unpacked(part, blob: Blob):
    """The value that stands in the JSON as `part`."""
    if isinstance(part, list):
        return [unpacked(inner, blob) for inner in part]
    if isinstance(part, int) and abs(part) >= 2**63:
        raise Malformed("a number that is too large")
    if not isinstance(part, dict):
        return part
    if set(part) == {"dict"}:
        return {str(key): unpacked(inner, blob) for key, inner in part["dict"]}
    return blob.tensor(*part["tensor"])


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
