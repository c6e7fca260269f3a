"""The names of chunks: hashes chained over a prompt."""

from __future__ import annotations

from blake3 import blake3

#: Bytes of one packed token id.
TOKEN_BYTES = 4


def chunk_hashes(
    tokens: bytes, chunk_size: int, model_name: str, world_size: int, cache_salt: str = ""
) -> list[bytes]:
    """Return one 32-byte hash for each whole chunk of a prompt.

    A chunk's hash covers the model, the salt and every token before it, so equal hashes mean equal
    prefixes.

    Args:
        tokens: token ids, each packed as a big-endian uint32.
        chunk_size: tokens a chunk; the part past the last whole chunk is left out.
        model_name: the model as the engine registered it.
        world_size: ranks that share the model; each keeps objects of its own.
        cache_salt: keeps users apart.
    """
    # Lengths first, so that no two different triples give the same bytes.
    fields = [model_name.encode(), str(world_size).encode(), cache_salt.encode()]
    root = b"".join(len(field).to_bytes(8, "big") + field for field in fields)
    previous = blake3(root).digest()
    step = chunk_size * TOKEN_BYTES
    view = memoryview(tokens)
    hashes = []
    for start in range(0, len(tokens) // step * step, step):
        previous = blake3(previous).update(view[start : start + step]).digest()
        hashes.append(previous)
    return hashes
