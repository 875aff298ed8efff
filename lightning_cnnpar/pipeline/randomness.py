"""The streams of random numbers that stages draw from.

Every rank of a replica runs the user's step with the same generators. A stage that drew its dropout masks from them
would move them on one rank only, and a mixup drawn afterwards would differ between the ranks. So each stage has streams
of its own, one on the CPU and one on the device, and the user's generators come out of a network call as they went in.
"""

import contextlib
import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor


class StageStreams:
    """Random number streams of the stages that this rank runs, created when first drawn from.

    Args:
        key: What sets these streams apart from others of the same seed: the network, the replica.
        device: Where the stages run.
    """

    def __init__(self, key: str, device: torch.device) -> None:
        self._key = key
        self.device = device
        self._states: dict[int, list[Tensor]] = {}

    @contextlib.contextmanager
    def drawing(self, stage: int) -> Iterator[None]:
        """Let the global generators be those of `stage` inside of the block."""
        outside = global_states(self.device)
        set_global_states(self.state(stage), self.device)
        try:
            yield
        finally:
            self._states[stage] = global_states(self.device)
            set_global_states(outside, self.device)

    def state(self, stage: int) -> list[Tensor]:
        """Where the streams of a stage are, for `replaying`."""
        return self._states.get(stage) or self._seeded(stage)

    @contextlib.contextmanager
    def replaying(self, state: list[Tensor]) -> Iterator[None]:
        """Let a stage draw again what it drew from `state` on; its streams stay where they are."""
        outside = global_states(self.device)
        set_global_states(state, self.device)
        try:
            yield
        finally:
            set_global_states(outside, self.device)

    def snapshot(self) -> Mapping[int, list[Tensor]]:
        """The present states, to go back to with `restore`."""
        return dict(self._states)

    def restore(self, snapshot: Mapping[int, list[Tensor]]) -> None:
        """Go back to a snapshot."""
        self._states = dict(snapshot)

    def state_dict(self) -> dict[str, Any]:
        """States by stage: a list with the CPU's and, on another device, the device's."""
        return {str(stage): [state.clone() for state in states] for stage, states in self._states.items()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue the streams of `state_dict`. A device's state is left out where the device is of another kind."""
        for stage, states in state_dict.items():
            fresh = self._seeded(int(stage))
            fits = [old if old.shape == new.shape else new for old, new in zip(states, fresh, strict=False)]
            self._states[int(stage)] = [*fits, *fresh[len(fits) :]]

    def _seeded(self, stage: int) -> list[Tensor]:
        text = f"{torch.initial_seed()}/{self._key}/{stage}"
        # `manual_seed` takes 64 bits; all of them should depend on all of the text.
        seed = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1
        devices = dict.fromkeys([torch.device("cpu"), self.device])
        return [torch.Generator(device).manual_seed(seed).get_state() for device in devices]


def global_states(device: torch.device) -> list[Tensor]:
    """States of the generators that code on `device` draws from: the CPU's and, on another device, that one's."""
    states = [torch.default_generator.get_state()]
    if device.type != "cpu":
        states.append(torch.get_device_module(device).get_rng_state(device))
    return states


def set_global_states(states: list[Tensor], device: torch.device) -> None:
    """Go back to `states`."""
    torch.default_generator.set_state(states[0])
    if device.type != "cpu":
        torch.get_device_module(device).set_rng_state(states[1], device)
