"""What is compressed how: by parameter, size and step."""

import dataclasses
import fnmatch
import math
from collections.abc import Mapping
from typing import Any

from lightning_cnnpar.compression.base import Compressor
from lightning_cnnpar.compression.onebit import OneBit
from lightning_cnnpar.compression.powersgd import PowerSGD
from lightning_cnnpar.compression.quantize import BFloat16, Int2, Int4, Int8
from lightning_cnnpar.compression.topk import TopK
from lightning_cnnpar.config import ConfigurationError

COMPRESSORS: Mapping[str, type[Compressor]] = {
    compressor.name: compressor for compressor in (BFloat16, Int8, Int4, Int2, OneBit, TopK, PowerSGD)
}
"""The compressors by name."""

_WARM_UP = Int2()


def from_name(name: str) -> Compressor:
    """The compressor of that name with its defaults.

    Raises:
        ConfigurationError: If there is none; lists the names.
    """
    if name not in COMPRESSORS:
        raise ConfigurationError(
            f"compression={name!r} is unknown. Known: {', '.join(map(repr, COMPRESSORS))}, 'auto'."
        )
    return COMPRESSORS[name]()


@dataclasses.dataclass(frozen=True)
class CompressionPolicy:
    """Which compressor a parameter's gradient takes in a step.

    Attributes:
        phases: Pairs of the first step and, by pattern of the parameter's name, the compressor (`None`: as it is). The
            first pattern that matches counts.
    """

    phases: tuple[tuple[int, tuple[tuple[str, Compressor | None], ...]], ...]

    def __post_init__(self) -> None:
        """Refuse what contradicts itself."""
        if len(self._momenta()) > 1:
            raise ConfigurationError(
                f"compression has TopK(momentum=...) of {' and '.join(map(str, sorted(self._momenta())))}: velocities"
                " belong to the whole run, so give the same everywhere."
            )

    @classmethod
    def of(cls, compression: Any) -> "CompressionPolicy":
        """The policy that a user means.

        Args:
            compression: A name, a `Compressor`, patterns and what they take (`{"*.fc.*": None, "*": "int4"}`), or steps
                and what holds from them on (`{0: "int2", 500: "onebit"}`), whose values may be patterns.

        Raises:
            ConfigurationError: For anything else.
        """
        if isinstance(compression, Mapping) and compression and all(type(key) is int for key in compression):
            if min(compression) != 0:
                raise ConfigurationError(
                    f"compression={compression!r} says nothing of the first steps: add a phase from step 0 on, such as"
                    " {0: 'int2', 500: 'onebit'}."
                )
            return cls(tuple((step, _patterns(what)) for step, what in sorted(compression.items())))
        return cls(((0, _patterns(compression)),))

    def compressor(self, name: str, shape: tuple[int, ...], step: int) -> Compressor | None:
        """What the parameter takes in an optimizer step; `None`: it travels as it is."""
        patterns = next(patterns for first, patterns in reversed(self.phases) if step >= first)
        found = next((what for pattern, what in patterns if fnmatch.fnmatchcase(name, pattern)), None)
        if found is None or len(shape) < 2 or math.prod(shape) < found.min_numel:
            return None
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in found.exclude):
            return None
        if step < found.warmup_steps:
            return dataclasses.replace(_WARM_UP, error_feedback=found.error_feedback)
        if isinstance(found, PowerSGD) and not found.pays(shape):
            return None
        return found.at_step(step - found.warmup_steps) if isinstance(found, TopK) else found

    @property
    def momentum(self) -> float:
        """Momentum of the velocities that travel in place of gradients; 0 for none."""
        return max(self._momenta())

    def _momenta(self) -> set[float]:
        taken = [what for _, patterns in self.phases for _, what in patterns]
        return {what.momentum for what in taken if isinstance(what, TopK)} or {0.0}


def _patterns(what: Any) -> tuple[tuple[str, Compressor | None], ...]:
    if isinstance(what, Mapping) and all(isinstance(key, str) for key in what):
        return tuple((pattern, _compressor(value)) for pattern, value in what.items())
    return (("*", _compressor(what)),)


def _compressor(what: Any) -> Compressor | None:
    if what is None or isinstance(what, Compressor):
        return what
    if isinstance(what, str):
        return from_name(what)
    raise ConfigurationError(
        f"compression={what!r}: give a name ({', '.join(map(repr, COMPRESSORS))}), a `Compressor`, or a dictionary of"
        " patterns or steps."
    )
