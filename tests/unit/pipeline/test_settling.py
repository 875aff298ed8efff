from lightning_cnnpar.partition.stage import Program, Stage
from lightning_cnnpar.pipeline.schedules import Action, step_tables
from lightning_cnnpar.pipeline.settling import settled_before


def _stage(index: int, rank: int, receives: tuple[str, ...], sends: tuple[str, ...], outputs: tuple[int, ...]) -> Stage:
    return Stage(
        index=index,
        rank=rank,
        inputs=(),
        receives=receives,
        sends=sends,
        outputs=outputs,
        modules=(),
        function=lambda *_: ((), ()),
    )


def _program(*stages: Stage) -> Program:
    return Program(stages=stages, num_outputs=1, assembly=lambda outputs, inputs: outputs)


CHAIN = _program(_stage(0, 0, (), ("a",), ()), _stage(1, 1, ("a",), (), (0,)))


def test_a_gradient_that_comes_back_proves_what_was_received() -> None:
    tables = step_tables("1f1b", [0, 1], 2, 3)
    settled = settled_before(CHAIN, tables, 0)
    # Before B0.0 nothing is known; it waits for the gradient of microbatch 0, after which that activation is done.
    assert settled[Action("B", 0, 0)] == ()
    assert settled[Action("F", 0, 2)] == (("F", 0, 1, 0),)
    assert settled[Action("B", 0, 2)] == (("F", 0, 1, 1),)


def test_an_activation_that_comes_proves_that_gradients_were_received() -> None:
    tables = step_tables("1f1b", [0, 1], 2, 4)
    settled = settled_before(CHAIN, tables, 1)
    # Rank 0 sends F0.2 after B0.0, which took the gradient of microbatch 0, and before it the outputs.
    assert ("B", 0, 0, 0) in settled[Action("B", 1, 2)]
    assert ("F", 1, 0, 0) in settled[Action("B", 1, 2)]
    assert all(("B", 0, 0, 3) not in keys for keys in settled.values())


def test_nothing_is_settled_before_it_is_sent() -> None:
    for schedule in ("1f1b", "zero_bubble"):
        tables = step_tables(schedule, [0, 1], 2, 5)  # type: ignore[arg-type]
        for rank in (0, 1):
            sent: set[tuple[str, int, int, int]] = set()
            settled = settled_before(CHAIN, tables, rank)
            for action in tables[rank]:
                assert set(settled[action]) <= sent
                if action.kind == "F":
                    sent.add(("F", action.stage, 1 - rank, action.microbatch))
                elif action.kind in ("B", "I"):
                    sent.add(("B", 0, 0, action.microbatch))
