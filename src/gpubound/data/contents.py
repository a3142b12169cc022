"""Which tokens and masks a corpus holds, as one number from its shards' checksums: no byte of them is read again.

It hangs on what lies end to end, not on where one shard ends and the next begins: a corpus that is built anew in shards of
another size is the same.
"""

import zlib
from collections.abc import Iterable, Sequence

from .shards import Shard
from .source import mix

_POLYNOMIAL = 0xEDB88320  # CRC-32's. Bit 31 is the coefficient of x^0, bit 0 that of x^31
_ONE, _BYTE = 1 << 31, 1 << 23  # 1 and x^8


def contents(shards: Sequence[Shard]) -> int:
    tokens = joined((shard.header.sections["tokens"][2], shard.tokens.nbytes) for shard in shards)
    masked = any(shard.mask is not None for shard in shards)
    return mix(tokens, joined((_mask_checksum(shard), len(shard.tokens)) for shard in shards) if masked else 0)


def _mask_checksum(shard: Shard) -> int:
    """Where no mask was stored, every token is learnt."""
    return shard.header.sections["mask"][2] if shard.mask is not None else zlib.crc32(b"\1" * len(shard.tokens))


def joined(runs: Iterable[tuple[int, int]]) -> int:
    """The CRC-32 of runs of bytes laid end to end, each given as its own CRC-32 and its length.

    >>> joined([(zlib.crc32(b"one "), 4), (zlib.crc32(b"corpus"), 6)]) == zlib.crc32(b"one corpus")
    True
    """
    crc = 0
    for own, length in runs:
        crc = _times(_power(length), crc) ^ own
    return crc


def _power(length: int) -> int:
    """x^(8 · length): what comes before so many bytes is multiplied by it."""
    power, square = _ONE, _BYTE
    while length:
        if length & 1:
            power = _times(power, square)
        square, length = _times(square, square), length >> 1
    return power


def _times(a: int, b: int) -> int:
    product = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return product
