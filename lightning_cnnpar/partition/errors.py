"""What can go wrong when a network is cut, in the user's terms."""

import linecache
import sysconfig
import traceback
from collections.abc import Sequence
from pathlib import Path


class PartitionError(ValueError):
    """A network can't be cut as asked. The message holds the values seen and what to change."""


class UntraceableError(PartitionError):
    """The forward of a network, or of a part that has to be cut, can't be followed by `torch.fx`.

    Attributes:
        module: Dotted name of the module whose forward it is; empty for the network itself.
        reason: What stopped it.
        candidates: Submodules that could be cut instead, the heaviest first.
    """

    def __init__(self, message: str, *, module: str, reason: str, candidates: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.module = module
        self.reason = reason
        self.candidates = tuple(candidates)


def untraceable(
    name: str, class_name: str, cause: BaseException, candidates: Sequence[str], num_stages: int
) -> UntraceableError:
    """The error for a network whose own forward can't be followed, with the line and three ways out."""
    where = user_line(cause)
    if candidates:
        instead = f'cut a submodule that can be followed: `network="{candidates[0]}"`'
        instead += f" (also {', '.join(repr(other) for other in candidates[1:4])})" if candidates[1:] else ""
    else:
        instead = 'name a submodule that can be followed: `network="..."`'
    message = (
        f"The forward of {name!r} ({class_name}) can't be cut in {num_stages} stages: {describe(cause)}\n"
        f"{where}"
        f"Ways out:\n"
        f"  1. {instead}\n"
        f"  2. move the lines above into an `nn.Module` of their own, called from the forward: a module that can't be"
        f" followed inside stays whole, on one stage\n"
        f"  3. cut nothing: `pipeline_parallel_size=1`"
    )
    return UntraceableError(message, module="", reason=describe(cause), candidates=candidates)


def describe(error: BaseException) -> str:
    """First line of an error, with its type where that says more."""
    text = str(error).strip().split("\n")[0]
    return text if isinstance(error, PartitionError) else f"{type(error).__name__}: {text}"


def user_line(error: BaseException) -> str:
    """The innermost line of the user's own code in an error's traceback, as `  File ..., line ...` text."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if is_user_file(frame.filename)]
    if not own:
        return ""
    frame = own[-1]
    line = linecache.getline(frame.filename, frame.lineno or 0).strip()
    return f'  File "{frame.filename}", line {frame.lineno}, in {frame.name}\n    {line}\n'


_PACKAGE = str(Path(__file__).parent.parent)
_LIBRARIES = tuple(
    str(Path(sysconfig.get_paths()[kind]) / package)
    for kind in ("purelib", "platlib")
    for package in ("torch", "lightning", "pytorch_lightning")
)
_STANDARD = (sysconfig.get_paths()["stdlib"], "<frozen", "<eval")


def is_user_file(filename: str) -> bool:
    """Whether a file is neither torch, Lightning, the standard library nor this package."""
    if filename.startswith(_PACKAGE):
        return False
    installed = "site-packages" in filename or "dist-packages" in filename
    return not filename.startswith(_LIBRARIES) and (installed or not filename.startswith(_STANDARD))
