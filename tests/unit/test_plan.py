"""A plan is plain data: JSON and back, and a table to read."""

from lightning_cnnpar.plan import ParallelPlan, StagePlan

PLAN = ParallelPlan(
    pipeline_parallel_size=2,
    data_parallel_size=2,
    num_microbatches=4,
    stages=(
        StagePlan(network="model", stage=0, rank=0, modules=("conv1", "bn1"), parameters=1000, flops=2_000_000),
        StagePlan(network="model", stage=1, rank=1, modules=("fc",), parameters=24),
    ),
    reason="asked for",
)


def test_json_gives_an_equal_plan_back() -> None:
    assert ParallelPlan.from_json(PLAN.to_json()) == PLAN


def test_table_names_ranks_and_modules() -> None:
    assert PLAN.table().splitlines() == [
        "Layout: 2 replica(s) x 2 stage rank(s), schedule gpipe, 4 microbatch(es), ideal bubble 20%. asked for",
        "network  stage  ranks  modules     parameters  FLOPs",
        "model    0      0, 2   conv1, bn1  1,000       2.00e+06",
        "model    1      1, 3   fc          24          -",
    ]


def test_bubble_is_zero_without_a_pipeline() -> None:
    assert ParallelPlan(pipeline_parallel_size=1, data_parallel_size=8).bubble_fraction == 0.0
