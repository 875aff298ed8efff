"""What `schedule="auto"` and `activation_checkpointing="auto"` take."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Situation:
    """What decides.

    Attributes:
        pipeline_size: P.
        num_microbatches: M.
        steps_itself: Whether the module steps its optimizers itself.
        parameter_bytes: Parameters, gradients and optimizer state of the whole model.
        activation_bytes: What autograd keeps of one batch of the whole model; 0 if unknown.
        available_bytes: What a rank may use.
    """

    pipeline_size: int
    num_microbatches: int
    steps_itself: bool
    parameter_bytes: int
    activation_bytes: int
    available_bytes: float


def choose_schedule(situation: Situation) -> tuple[str, str]:
    """The schedule, and why, in a sentence.

    GPipe runs the user's step once on the whole batch, which is exact for any loss, so it is taken wherever its
    activations fit. Else the step runs once for each microbatch: with P - p of them alive, 1F1B has the bubble of
    GPipe, and "zero_bubble" a third of it for the memory of 1F1B's first rank on every rank.
    """
    ranks, count = situation.pipeline_size, situation.num_microbatches
    if ranks == 1 or count == 1:
        return "gpipe", "schedule='auto' takes 'gpipe': with one stage or one microbatch there is nothing to order."
    if situation.steps_itself:
        return "gpipe", "schedule='auto' takes 'gpipe': the module steps its optimizers itself, once a batch."
    if not situation.activation_bytes:
        return "gpipe", (
            "schedule='auto' takes 'gpipe': how much activations need is unknown (set `example_input_array` to the size"
            " of a batch), and it is exact for any loss."
        )
    own = situation.parameter_bytes / ranks
    alive = situation.activation_bytes / ranks
    needed = {"gpipe": own + alive, "1f1b": own + alive * min(ranks, count) / count}
    seen = ", ".join(f"{name} {size / 2**30:.2f}" for name, size in needed.items())
    room = f"the first rank needs about (GiB) {seen}, of {situation.available_bytes / 2**30:.2f}"
    if needed["gpipe"] <= situation.available_bytes:
        return "gpipe", f"schedule='auto' takes 'gpipe': {room}; it fits, and is exact for any loss."
    if needed["1f1b"] <= situation.available_bytes:
        before, after = (ranks - 1) / (count + ranks - 1), (ranks - 1) / (3 * count + ranks - 1)
        return "zero_bubble", (
            f"schedule='auto' takes 'zero_bubble': {room}; it needs no more than 1f1b's first rank, with a bubble of"
            f" {after:.0%} in place of {before:.0%}. The step runs once for each microbatch."
        )
    return "1f1b", (
        f"schedule='auto' takes '1f1b', which needs least: {room}. Expect it not to fit: use more microbatches, a"
        " longer pipeline, activation_checkpointing or a smaller batch."
    )


def choose_checkpointing(situation: Situation, schedule: str) -> tuple[str, str]:
    """Whether activations are computed again, and why, in a sentence.

    "except_last" has the peak of "always", since one microbatch's activations are alive in either, and less work.
    """
    ranks, count = situation.pipeline_size, situation.num_microbatches
    if not situation.activation_bytes:
        return "never", (
            "activation_checkpointing='auto' takes 'never': how much activations need is unknown (set"
            " `example_input_array` to the size of a batch)."
        )
    share = 1.0 if schedule == "gpipe" else min(ranks, count) / count
    needed = (situation.parameter_bytes + situation.activation_bytes * share) / ranks
    chosen = "never" if needed <= situation.available_bytes else "except_last"
    return chosen, (
        f"activation_checkpointing='auto' takes {chosen!r}: without it, the first rank needs about"
        f" {needed / 2**30:.2f} of {situation.available_bytes / 2**30:.2f} GiB."
    )
