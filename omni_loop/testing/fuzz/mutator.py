"""Bad bytes out of good ones: a seeded draw of mutations, of the bytes and of the message they hold.

Bytes alone rarely keep a message whole, and a whole message alone never tests the parser, so both are drawn. The byte
mutations are those of AFL's havoc stage (Zalewski); the fields are found by reflection, so new ones are fuzzed too.
"""

from __future__ import annotations

import random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

MAX_BYTES = 1 << 14  # of what grows; larger seeds stay as they are
WHOLE = (
    *(0, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 63, 64, 127, 128, 192, 255, 256, 4096, 65535, 65536, 65537),
    *(1 << 20, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, (1 << 53) - 1, 1 << 53, (1 << 53) + 1),
    *((1 << 62) - 1, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, -1, -2, -128, -(1 << 31), -(1 << 53), -(1 << 63)),
)
REAL = (0.0, -0.0, 1.0, -1.0, 0.5, 1e-45, 1e-308, 3.4e38, 1e39, 1.8e308, float("inf"), -float("inf"), float("nan"))
TEXTS = (
    *("", "a", "image", "agent_pos", "points", "gripper", "Image", "observation.image", "cem", "mppi", "CEM", "toy"),
    *("\0", "a\0b", "../../etc/passwd", "x" * 65, "x" * 257, "x" * 4097, "推 T 到目標", "\U0001f916", "%s%n", "{0}"),
)
PIECES = (
    *(b"", b"\0", b"\xff", b"\x80", b"\0\0\xc0\x7f", b"\0\0\x80\x7f", b"\0\0\x80\xff", b"\x01", b"\x02", b"\xff" * 9),
    *(b"\x80" * 9 + b"\x01", b"\xff" * 9 + b"\x01", b"\x0b", b"\x0c", b"\x0a\x80\x80\x80\x80\x08", b"\xc3\x28"),
    *(b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff\xe0", b"IHDR", b"IDAT", b"IEND\xaeB`\x82", b"\x80\x04\x95", b"\x1f\x8b\x08"),
)
_INTS = {
    FieldDescriptor.CPPTYPE_INT32: (-(1 << 31), 1 << 31),
    FieldDescriptor.CPPTYPE_INT64: (-(1 << 63), 1 << 63),
    FieldDescriptor.CPPTYPE_UINT32: (0, 1 << 32),
    FieldDescriptor.CPPTYPE_UINT64: (0, 1 << 64),
    FieldDescriptor.CPPTYPE_ENUM: (-(1 << 31), 1 << 31),
}


class Mutator:
    """``draw`` decides everything: the same seeds and draws give the same inputs."""

    def __init__(self, draw: random.Random) -> None:
        self._draw = draw

    def mutate(self, raw: bytes, other: bytes, kind: type[Message]) -> bytes:
        """Something like ``raw``, of a message of ``kind``; ``other`` gives pieces."""
        draw = self._draw
        chance = draw.random()
        if chance < 0.5:
            try:
                message = kind.FromString(raw)
            except DecodeError:
                return self.spoil_bytes(raw, other)
            for _ in range(1 + int(draw.expovariate(1.2))):
                self.spoil_message(message)
            raw = message.SerializeToString(deterministic=True)
            if chance > 0.05:
                return raw
        return self.spoil_bytes(raw, other)

    def spoil_bytes(self, raw: bytes, other: bytes) -> bytes:
        """One to a few changes of the bytes themselves."""
        draw = self._draw
        data = bytearray(raw)
        for _ in range(1 + int(draw.expovariate(0.7))):
            self._change(data, other)
        return bytes(data)

    def _change(self, data: bytearray, other: bytes) -> None:
        draw = self._draw
        at = int(draw.random() * len(data))
        match int(draw.random() * 10):
            case 0 | 1 if data:
                data[at] ^= 1 << draw.getrandbits(3)
            case 2 if data:
                data[at] = draw.getrandbits(8)
            case 3 if data:
                data[at] = (data[at] + draw.choice((1, -1, 16, -16, 127))) & 255
            case 4:
                del data[at : at + 1 + int(draw.expovariate(0.2))]
            case 5:
                del data[at:]
            case 6:
                data[at:at] = draw.choice(PIECES)
            case 7:
                piece = draw.choice(PIECES)
                data[at : at + len(piece)] = piece
            case 8 if other:
                begin = int(draw.random() * len(other))
                data[at:at] = other[begin : begin + 1 + int(draw.expovariate(0.05))]
            case _ if data and len(data) < MAX_BYTES:
                data[at:at] = data[at : at + 1 + int(draw.expovariate(0.05))]

    def spoil_message(self, message: Message) -> None:
        """One change of one field, here or in a message inside."""
        draw = self._draw
        present = message.ListFields()
        field: Any
        value: Any
        if present and draw.random() < 0.75:
            field, value = present[int(draw.random() * len(present))]
        else:
            fields = message.DESCRIPTOR.fields
            if not fields:
                return
            field = fields[int(draw.random() * len(fields))]
            value = getattr(message, field.name)
        if draw.random() < 0.05:
            message.ClearField(field.name)
        elif field.message_type is not None and field.message_type.GetOptions().map_entry:
            self._map(field, value)
        elif field.is_repeated:
            self._repeated(field, value)
        elif field.message_type is not None:
            if draw.random() < 0.05:
                value.SetInParent()
            else:
                self.spoil_message(value)
        else:
            setattr(message, field.name, self._value(field, value))

    def _map(self, field: FieldDescriptor, value: Any) -> None:
        draw = self._draw
        assert field.message_type is not None
        entry = field.message_type.fields_by_name
        key_field, value_field = entry["key"], entry["value"]
        keys = sorted(value)  # else in the order of their hashes
        key = draw.choice(keys) if keys and draw.random() < 0.8 else self._value(key_field, "")
        if keys and draw.random() < 0.15:
            del value[draw.choice(keys)]
        elif value_field.message_type is None:
            value[key] = self._value(value_field, value.get(key, b""))
        elif keys and draw.random() < 0.2:
            value[key].CopyFrom(value[draw.choice(keys)])
        else:
            self.spoil_message(value[key])

    def _repeated(self, field: FieldDescriptor, value: Any) -> None:
        draw = self._draw
        n = len(value)
        chance = draw.random()
        if field.message_type is not None:
            if n and chance < 0.7:
                self.spoil_message(value[int(draw.random() * n)])
            elif n and chance < 0.85:
                del value[int(draw.random() * n)]
            else:
                value.add()
        elif n and chance < 0.6:
            at = int(draw.random() * n)
            value[at] = self._value(field, value[at])
        elif n and chance < 0.75:
            del value[int(draw.random() * n)]
        else:
            for _ in range(1 if chance < 0.98 else 1000):
                value.append(self._value(field, 0))

    def _value(self, field: FieldDescriptor, value: Any) -> Any:
        draw = self._draw
        kind = field.cpp_type
        if kind in _INTS:
            low, high = _INTS[kind]
            near = int(value or 0) + draw.choice((1, -1, 2, -2))
            whole = near if draw.random() < 0.4 else draw.choice(WHOLE)
            return whole if low <= whole < high else draw.randrange(low, high)
        if kind in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
            return draw.choice(REAL)
        if kind == FieldDescriptor.CPPTYPE_BOOL:
            return not value
        if field.type == FieldDescriptor.TYPE_BYTES:
            return self.spoil_bytes(value or b"", b"")
        return draw.choice(TEXTS)
