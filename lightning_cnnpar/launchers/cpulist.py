"""Sets of CPUs (or nodes) in the kernel's two notations: lists such as `0-3,8`, masks such as `ff,00000000`."""

from collections.abc import Iterable


def parse_list(text: str) -> frozenset[int]:
    """The members of a list such as `0-3,8`; blanks and NULs around it don't count.

    Raises:
        ValueError: If the text is something else.
    """
    members: set[int] = set()
    for part in clean(text).split(","):
        if part.strip():
            first, dash, last = part.partition("-")
            members.update(range(int(first), int(last if dash else first) + 1))
    return frozenset(members)


def parse_mask(text: str) -> frozenset[int]:
    """The members of a hexadecimal mask in groups of 32 bits, the highest first.

    Raises:
        ValueError: If the text is something else.
    """
    bits = 0
    for group in clean(text).split(","):
        bits = bits << 32 | int(group.strip() or "0", 16)
    return frozenset(number for number in range(bits.bit_length()) if bits >> number & 1)


def format_list(members: Iterable[int]) -> str:
    """The shortest list, ascending: `0-3,8`."""
    runs: list[list[int]] = []
    for member in sorted(set(members)):
        if runs and member == runs[-1][1] + 1:
            runs[-1][1] = member
        else:
            runs.append([member, member])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def clean(text: str) -> str:
    """Without what surrounds the value: some firmware and virtual files end in NULs."""
    return text.replace("\0", " ").strip()
