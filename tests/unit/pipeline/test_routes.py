from lightning_cnnpar.pipeline.routes import Routes, plan_routes
from lightning_cnnpar.pipeline.schedules import Action, gpipe
from tests.unit.pipeline.graphs import skips


def _routes(starts: list[int], ranks: list[int], rank: int, microbatches: int = 2) -> Routes:
    program = skips().cut(starts, ranks)
    return plan_routes(program, rank, max(ranks) + 1, lambda other: gpipe(ranks, other, microbatches))


def test_a_skip_goes_straight_to_its_reader() -> None:
    """Stage 0 makes `a` and the early head, stage 2 reads `a`; every rank gets the outputs."""
    outgoing = _routes([0, 2, 5], [0, 1, 2], 0).outgoing[0]
    assert [(b.destination, b.values, b.outputs) for b in outgoing] == [(1, ("a",), (1,)), (2, ("a",), (1,))]
    (bundle,) = _routes([0, 2, 5], [0, 1, 2], 1).outgoing[1]
    assert (bundle.destination, bundle.values, bundle.outputs) == (2, ("up",), ())


def test_both_ends_agree_on_the_order() -> None:
    starts, ranks = [0, 2, 4, 6], [0, 1, 0, 1]
    first, second = _routes(starts, ranks, 0), _routes(starts, ranks, 1)
    order = [(bundle.stage, m) for bundle, m in second.incoming[0]]
    assert order == [(0, 0), (0, 1), (2, 0), (2, 1)]
    sent_back = [(b.stage, m) for action in second.table.backward for b, m in second.gradients_after[action]]
    assert sent_back == [(b.stage, m) for b, m in first.gradients_from[1]]


def test_gradients_leave_after_the_last_reader() -> None:
    """`a` is read by stages 1 and 3 of rank 1; its gradient is complete after the earlier one."""
    routes = _routes([0, 2, 4, 6], [0, 1, 0, 1], 1, microbatches=1)
    after = {str(action): [b.stage for b, _ in parcels] for action, parcels in routes.gradients_after.items()}
    assert after == {"B3.0": [2], "B1.0": [0]}


def test_values_between_stages_of_one_rank_stay_there() -> None:
    routes = _routes([0, 2, 3, 5], [0, 1, 1, 0], 1)
    assert routes.local == {"b"}
    assert [bundle.values for bundle in routes.outgoing[1]] == []
    assert routes.read_last[2] == ("b",)
    assert Action("B", 2, 0) in routes.gradients_after
