"""Options are refused before a process starts, with the values and the fix."""

import pytest

from lightning_cnnpar.config import ConfigurationError, HybridOptions, NumaBinding, resolve_sizes


@pytest.mark.parametrize(
    ("pipeline", "data", "devices", "nodes", "expected"),
    [
        (2, 2, 4, 1, (2, 2)),
        ("auto", 2, 4, 1, (2, 2)),
        (2, "auto", 4, 2, (2, 4)),
        ("auto", "auto", 4, 2, (1, 8)),
        (1, 1, 1, 1, (1, 1)),
        (4, 1, 4, 1, (4, 1)),
    ],
)
def test_sizes_fill_the_world(pipeline: object, data: object, devices: int, nodes: int, expected: object) -> None:
    found = resolve_sizes(pipeline, data, devices_per_node=devices, num_nodes=nodes)  # type: ignore[arg-type]
    assert found == expected


def test_auto_takes_the_smallest_pipeline_that_fits() -> None:
    sizes = resolve_sizes("auto", "auto", devices_per_node=8, num_nodes=2, smallest_pipeline=4)
    assert sizes == (4, 4)


@pytest.mark.parametrize(
    ("pipeline", "data", "devices", "nodes", "message"),
    [
        (2, 2, 2, 1, r"pipeline_parallel_size=2 x data_parallel_size=2 needs 4 ranks, but devices=2 x num_nodes=1"),
        (3, "auto", 4, 1, r"pipeline_parallel_size=3 does not divide the world.*Possible: 1, 2, 4"),
        ("auto", 3, 4, 1, r"data_parallel_size=3 does not divide"),
        (4, "auto", 2, 2, r"does not divide the 2 devices of a node: a replica would straddle nodes. Possible: 1, 2"),
    ],
)
def test_sizes_that_do_not_fit_are_named(
    pipeline: object, data: object, devices: int, nodes: int, message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        resolve_sizes(pipeline, data, devices_per_node=devices, num_nodes=nodes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "pipedream"}, r"schedule='pipedream' is unknown. Known: 'gpipe'"),
        ({"schedule": "interleaved_1f1b"}, r"stages_per_rank=1 is '1f1b': give stages_per_rank=2 or more"),
        ({"schedule": "gpipe", "stages_per_rank": 2}, r"needs schedule='interleaved_1f1b' or 'zero_bubble'"),
        ({"stages_per_rank": 0}, r"stages_per_rank=0: give a whole number of at least 1"),
        ({"pipeline_parallel_size": 0}, r"pipeline_parallel_size=0: give a whole number of at least 1"),
        ({"num_microbatches": 2.5}, r"num_microbatches=2.5"),
        ({"num_microbatches": True}, r"num_microbatches=True"),
        ({"balance": "speed"}, r"balance='speed' is unknown"),
        ({"balance": [1.0, -1.0]}, r"one positive relative speed"),
        ({"zero_stage": 4}, r"zero_stage=4 is unknown"),
        ({"numa": "on"}, r"numa='on' is unknown. Known: 'auto', 'off', NumaBinding\(mode='node', memory='preferred'\)"),
    ],
)
def test_bad_options_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        HybridOptions(**options)  # type: ignore[arg-type]


def test_a_binding_of_unknown_kind_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"NumaBinding.mode='core' is unknown. Known: 'node', 'cores'"):
        NumaBinding(mode="core")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"NumaBinding.memory='local' is unknown. Known: 'preferred', 'bind'"):
        NumaBinding(memory="local")  # type: ignore[arg-type]
