import torch

from lightning_cnnpar.pipeline.randomness import StageStreams

CPU = torch.device("cpu")


def _draw(streams: StageStreams, stage: int) -> list[float]:
    with streams.drawing(stage):
        drawn: list[float] = torch.rand(3).tolist()
    return drawn


def test_the_users_generator_is_untouched() -> None:
    streams = StageStreams("model/0", CPU)
    before = torch.get_rng_state()
    _draw(streams, 0)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_users_generator_survives_an_error() -> None:
    streams = StageStreams("model/0", CPU)
    before = torch.get_rng_state()
    try:
        with streams.drawing(0):
            torch.rand(1)
            raise KeyError
    except KeyError:
        pass
    assert torch.equal(torch.get_rng_state(), before)


def test_streams_go_on_and_differ() -> None:
    streams, other = StageStreams("model/0", CPU), StageStreams("model/1", CPU)
    draws = [_draw(streams, 0), _draw(streams, 0), _draw(streams, 1), _draw(other, 0)]
    assert len({tuple(draw) for draw in draws}) == 4


def test_same_seed_same_stream() -> None:
    torch.manual_seed(3)
    first = _draw(StageStreams("model/0", CPU), 0)
    torch.rand(5)
    assert _draw(StageStreams("model/0", CPU), 0) == first
    torch.manual_seed(4)
    assert _draw(StageStreams("model/0", CPU), 0) != first


def test_state_can_be_saved_and_loaded() -> None:
    streams = StageStreams("model/0", CPU)
    _draw(streams, 1)
    state = streams.state_dict()
    expected = _draw(streams, 1)
    torch.manual_seed(99)
    resumed = StageStreams("model/0", CPU)
    resumed.load_state_dict(state)
    assert _draw(resumed, 1) == expected


def test_snapshot() -> None:
    streams = StageStreams("model/0", CPU)
    snapshot = streams.snapshot()
    first = _draw(streams, 0)
    streams.restore(snapshot)
    assert _draw(streams, 0) == first
