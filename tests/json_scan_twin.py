"""The scanner of JSON arrays in slow, plain Python."""

from __future__ import annotations


def array_ends(data: bytes) -> list[int]:
    """Return the ends of the elements of an array; ``data`` begins after its opening bracket."""
    ends, depth, quoted, i = [], 1, False, 0
    while i < len(data) and depth:
        char = chr(data[i])
        if quoted and char == "\\":
            i += 1
        elif char == '"':
            quoted = not quoted
        elif not quoted:
            depth += (char in "[{") - (char in "]}")
            if depth == 0 or (depth == 1 and char == ","):
                ends.append(i)
        i += 1
    return ends
