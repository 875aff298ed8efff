"""The options of a run, checked before any process starts."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, get_args

ScheduleName = Literal["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble", "auto"]
BalanceName = Literal["flops", "time", "memory", "parameters"]
CheckpointingName = Literal["never", "except_last", "always", "auto"]
StartMethod = Literal["popen", "spawn", "fork", "forkserver"]
Auto = Literal["auto"]
NumaMode = Literal["node", "cores"]
MemoryPolicy = Literal["preferred", "bind", "off"]
Size = int | Auto
Balance = BalanceName | Sequence[float]

STEP_SCHEDULES = ("1f1b", "interleaved_1f1b", "zero_bubble")
"""Those that run the user's step once for each microbatch."""


class ConfigurationError(ValueError):
    """An option, or a combination of options, that can't work; the message says which values and what to change."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class NumaBinding:
    """How ranks are bound to the NUMA nodes that their devices hang on.

    Attributes:
        mode: "node" lets a rank run on all CPUs of its node, "cores" on a share of the node's physical cores of its
            own. In both, a rank computes with as many threads as its share has cores.
        memory: Where a rank's memory is allocated: "preferred" takes the node's own while there is some, "bind" never
            takes another node's, "off" leaves it to the system.

    Raises:
        ConfigurationError: For other values.
    """

    mode: NumaMode = "node"
    memory: MemoryPolicy = "preferred"

    def __post_init__(self) -> None:
        """Refuse unknown names."""
        _check_choice("NumaBinding.mode", self.mode, get_args(NumaMode))
        _check_choice("NumaBinding.memory", self.memory, get_args(MemoryPolicy))


Numa = Literal["auto", "off"] | NumaBinding


@dataclasses.dataclass(frozen=True, kw_only=True)
class HybridOptions:
    """What `HybridStrategy` was asked for; the meaning of each field is documented there."""

    pipeline_parallel_size: Size = "auto"
    data_parallel_size: Size = "auto"
    schedule: str = "gpipe"
    num_microbatches: Size = "auto"
    stages_per_rank: int = 1
    network: str | None = None
    cut_points: tuple[str, ...] | None = None
    balance: Balance = "flops"
    activation_checkpointing: str = "never"
    deferred_batch_norm: bool = True
    zero_stage: int = 0
    compression: Any = None
    numa: Numa = "auto"

    def __post_init__(self) -> None:
        """Refuse values that no run could use."""
        for name in ("pipeline_parallel_size", "data_parallel_size", "num_microbatches"):
            _check_size(name, getattr(self, name))
        _check_choice("schedule", self.schedule, get_args(ScheduleName))
        _check_choice("activation_checkpointing", self.activation_checkpointing, get_args(CheckpointingName))
        _check_choice("zero_stage", self.zero_stage, (0, 1, 2, 3))
        _check_stages_per_rank(self.schedule, self.stages_per_rank)
        _check_balance(self.balance)
        if not isinstance(self.numa, NumaBinding):
            _check_choice("numa", self.numa, ("auto", "off", NumaBinding()))
        self._check_availability()

    def _check_availability(self) -> None:
        if self.zero_stage > 0 and self.schedule in STEP_SCHEDULES:
            raise _not_yet(
                "schedule", self.schedule, f"zero_stage={self.zero_stage} goes with 'gpipe', use that or zero_stage=0"
            )
        if self.zero_stage > 0 and self.activation_checkpointing != "never":
            raise _not_yet(
                "activation_checkpointing",
                self.activation_checkpointing,
                f"zero_stage={self.zero_stage} goes with 'never', use that or zero_stage=0",
            )


def _check_size(name: str, value: Any) -> None:
    if value == "auto":
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigurationError(f"{name}={value!r}: give a whole number of at least 1, or 'auto'.")


def _check_stages_per_rank(schedule: str, stages_per_rank: Any) -> None:
    if not isinstance(stages_per_rank, int) or isinstance(stages_per_rank, bool) or stages_per_rank < 1:
        raise ConfigurationError(f"stages_per_rank={stages_per_rank!r}: give a whole number of at least 1.")
    if schedule == "interleaved_1f1b" and stages_per_rank == 1:
        raise ConfigurationError(
            "schedule='interleaved_1f1b' with stages_per_rank=1 is '1f1b': give stages_per_rank=2 or more."
        )
    if stages_per_rank > 1 and schedule not in ("interleaved_1f1b", "zero_bubble"):
        raise ConfigurationError(
            f"stages_per_rank={stages_per_rank} needs schedule='interleaved_1f1b' or 'zero_bubble', not {schedule!r}."
        )


def _check_choice(name: str, value: Any, known: Sequence[Any]) -> None:
    if value not in known:
        raise ConfigurationError(f"{name}={value!r} is unknown. Known: {', '.join(map(repr, known))}.")


def _check_balance(balance: Any) -> None:
    if isinstance(balance, str):
        _check_choice("balance", balance, get_args(BalanceName))
    elif not balance or any(not isinstance(speed, (int, float)) or speed <= 0 for speed in balance):
        raise ConfigurationError(
            f"balance={balance!r}: give {', '.join(map(repr, get_args(BalanceName)))}, or one positive relative speed"
            f" for each rank of a replica, such as [2.0, 1.0]."
        )


def _not_yet(name: str, value: Any, instead: str) -> ConfigurationError:
    return ConfigurationError(f"{name}={value!r} is not available in this version: {instead}.")


def resolve_sizes(
    pipeline: Size, data: Size, *, devices_per_node: int, num_nodes: int, smallest_pipeline: int = 1
) -> tuple[int, int]:
    """Pipeline and data size of a run.

    Args:
        pipeline: Ranks of a replica asked for, or "auto".
        data: Replicas asked for, or "auto".
        devices_per_node: Ranks on each node.
        num_nodes: Nodes.
        smallest_pipeline: What "auto" takes for `pipeline` where `data` leaves it open: the smallest number of ranks
            over which the model fits.

    Returns:
        (P, D) with P x D = number of ranks.

    Raises:
        ConfigurationError: If the sizes don't multiply to the number of ranks, or a replica would straddle nodes.
    """
    world = devices_per_node * num_nodes
    started = f"devices={devices_per_node} x num_nodes={num_nodes} starts {world} ranks"
    if pipeline == "auto" and data == "auto":
        pipeline = smallest_pipeline
    if pipeline == "auto":
        pipeline = _quotient(world, data, "data_parallel_size", started)
    if data == "auto":
        data = _quotient(world, pipeline, "pipeline_parallel_size", started)
    assert isinstance(pipeline, int)
    assert isinstance(data, int)
    if pipeline * data != world:
        raise ConfigurationError(
            f"pipeline_parallel_size={pipeline} x data_parallel_size={data} needs {pipeline * data} ranks, but"
            f" {started}. Change `devices`, `num_nodes` or one of the sizes ('auto' fills in what is left)."
        )
    if devices_per_node % pipeline:
        raise ConfigurationError(
            f"pipeline_parallel_size={pipeline} does not divide the {devices_per_node} devices of a node: a replica"
            f" would straddle nodes. Possible: {', '.join(map(str, divisors(devices_per_node)))}."
        )
    return pipeline, data


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    return [d for d in range(1, number + 1) if number % d == 0]


def _quotient(world: int, size: Any, name: str, started: str) -> int:
    if world % size:
        raise ConfigurationError(
            f"{name}={size} does not divide the world: {started}. Possible: {', '.join(map(str, divisors(world)))}."
        )
    return int(world // size)
