"""Small networks written as a list of steps, which can be cut by hand at any step, without the partitioner."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_cnnpar import tree
from lightning_cnnpar.partition.stage import Program, Stage

Step = tuple[str, nn.Module | Callable[..., Any], tuple[str, ...]]


class GraphNet(nn.Module):
    """Runs steps (result, what to call, arguments); inputs are called "in0", "in1", ...

    Args:
        steps: In order.
        outputs: Names of the results that are the network's outputs.
        build: Makes of the outputs what forward returns.
    """

    def __init__(
        self, steps: Sequence[Step], outputs: Sequence[str], build: Callable[[Sequence[Tensor]], Any] = tuple
    ) -> None:
        super().__init__()
        self.steps, self.outputs, self.build = list(steps), list(outputs), build
        for name, call, _ in steps:
            if isinstance(call, nn.Module):
                self.add_module(name, call)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        leaves, _ = tree.flatten((args, kwargs))
        values = {f"in{i}": leaf for i, leaf in enumerate(leaves)}
        run_steps(self, self.steps, values)
        return self.build([values[name] for name in self.outputs])

    def cut(self, starts: Sequence[int], ranks: Sequence[int]) -> Program:
        """Stages that begin at the given steps (the first is 0), on the given ranks."""
        ends = [*starts[1:], len(self.steps)]
        parts = [self.steps[start:end] for start, end in zip(starts, ends, strict=True)]
        made = [{name for name, _, _ in part} for part in parts]
        reads = [dict.fromkeys(arg for _, _, args in part for arg in args) for part in parts]
        stages = []
        for i, (part, rank) in enumerate(zip(parts, ranks, strict=True)):
            needed = {name for later in reads[i + 1 :] for name in later}
            inputs = tuple(int(name[2:]) for name in reads[i] if name.startswith("in"))
            receives = tuple(name for name in reads[i] if not name.startswith("in") and name not in made[i])
            sends = tuple(name for name, _, _ in part if name in needed)
            outputs = tuple(k for k, name in enumerate(self.outputs) if name in made[i])
            stages.append(
                Stage(
                    index=i,
                    rank=rank,
                    inputs=inputs,
                    receives=receives,
                    sends=sends,
                    outputs=outputs,
                    modules=tuple(name for name, call, _ in part if isinstance(call, nn.Module)),
                    function=_stage_function(part, inputs, receives, sends, [self.outputs[k] for k in outputs]),
                )
            )
        return Program(
            stages=tuple(stages),
            num_outputs=len(self.outputs),
            assembly=lambda outputs, _: self.build(outputs),
        )


class HandCut:
    """Gives the same program for every call, as long as the training flag stays."""

    def __init__(self, net: GraphNet, starts: Sequence[int], ranks: Sequence[int]) -> None:
        self._programs = {mode: net.cut(starts, ranks) for mode in (True, False)}
        self._net = net

    def program(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Program:
        return self._programs[self._net.training]


def run_steps(root: nn.Module, steps: Sequence[Step], values: dict[str, Any]) -> None:
    for name, call, args in steps:
        function = getattr(root, name) if isinstance(call, nn.Module) else call
        values[name] = function(*(values[arg] for arg in args))


def _stage_function(
    steps: Sequence[Step], inputs: Sequence[int], receives: Sequence[str], sends: Sequence[str], outputs: Sequence[str]
) -> Callable[..., tuple[tuple[Tensor, ...], tuple[Tensor, ...]]]:
    names = [*(f"in{i}" for i in inputs), *receives]

    def function(root: nn.Module, *args: Any) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        values = dict(zip(names, args, strict=True))
        run_steps(root, steps, values)
        return tuple(values[name] for name in sends), tuple(values[name] for name in outputs)

    return function


def only(outputs: Sequence[Tensor]) -> Tensor:
    """The output of a network that has one."""
    (output,) = outputs
    return output


def conv(channels_in: int, channels_out: int, *, stride: int = 1, norm: bool = False) -> nn.Module:
    """A convolution with a smooth activation, so that float64 comparisons are sharp."""
    layers: list[nn.Module] = [nn.Conv2d(channels_in, channels_out, 3, stride, 1), nn.Tanh()]
    if norm:
        layers.insert(1, nn.BatchNorm2d(channels_out))
    return nn.Sequential(*layers)


def head(channels: int, classes: int = 5) -> nn.Module:
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


def chain(*, norm: bool = False, dropout: float = 0.0) -> GraphNet:
    """Four layers and a head in a row."""
    drop = nn.Dropout(dropout) if dropout else nn.Identity()
    steps: list[Step] = [
        ("a", conv(3, 4, norm=norm), ("in0",)),
        ("b", conv(4, 6, stride=2, norm=norm), ("a",)),
        ("drop", drop, ("b",)),
        ("c", conv(6, 4, norm=norm), ("drop",)),
        ("d", head(4), ("c",)),
    ]
    return GraphNet(steps, ["d"], only)


def skips() -> GraphNet:
    """A small U-Net with skips over stages that are not neighbours, and an early head in a dictionary."""
    steps: list[Step] = [
        ("a", conv(3, 4), ("in0",)),
        ("aux", nn.Conv2d(4, 2, 1), ("a",)),
        ("b", conv(4, 6, stride=2), ("a",)),
        ("c", conv(6, 6), ("b",)),
        ("up", nn.Upsample(scale_factor=2), ("c",)),
        ("join", lambda up, a: torch.cat([up, a], 1), ("up", "a")),
        ("d", conv(10, 4), ("join",)),
        ("out", nn.Conv2d(4, 2, 1), ("d",)),
    ]
    return GraphNet(steps, ["out", "aux"], lambda outputs: {"out": outputs[0], "aux": outputs[1]})
