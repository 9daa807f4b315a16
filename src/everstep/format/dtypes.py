"""Logical dtypes (torch's names) and how safetensors carries them.

What every released safetensors reader knows is stored under its own dtype; the rest is stored as
bytes ("U8", one dimension) and keeps its logical dtype in the manifest's table.
"""

CARRIED = {
    "float64": ("F64", 8),
    "float32": ("F32", 4),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "int64": ("I64", 8),
    "int32": ("I32", 4),
    "int16": ("I16", 2),
    "int8": ("I8", 1),
    "uint64": ("U64", 8),
    "uint32": ("U32", 4),
    "uint16": ("U16", 2),
    "uint8": ("U8", 1),
    "bool": ("BOOL", 1),
}
_AS_BYTES = {
    "complex128": 16,
    "complex64": 8,
    "complex32": 4,
    "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
}

ITEM_SIZES: dict[str, int] = {name: size for name, (_, size) in CARRIED.items()} | _AS_BYTES


def plane_count(dtype: str) -> int:
    """Into how many byte planes an item goes (codecs/planes.py); complex128 counts as two."""
    return min(8, ITEM_SIZES[dtype])


def carried_as(dtype: str, shape: tuple[int, ...], size: int) -> tuple[str, list[int]]:
    """The safetensors dtype and shape under which a tensor of `size` bytes is stored."""
    if dtype in CARRIED:
        return CARRIED[dtype][0], list(shape)
    return "U8", [size]
