"""What a run with another number of replicas makes of the residuals in a checkpoint."""

import torch

from lightning_cnnpar.compression.residual import Residuals


def test_residuals_and_velocities_are_shared_out_to_another_number_of_replicas() -> None:
    state = {"a": torch.randn(3, 4, 5), "a/velocity": torch.randn(2, 4, 5), "a/factor": torch.randn(5, 2)}
    parameter = torch.empty(4, 5)
    for size in (1, 2, 3):
        ranks = [Residuals(rank, size) for rank in range(size)]
        for one in ranks:
            one.load(state)
            assert one.saved.keys() == state.keys()
            one.take_up({"a": parameter, "b": torch.empty(3)})
            assert not one.saved
            assert torch.equal(one.factors["a"], state["a/factor"])
        worker = torch.stack([one.worker["a"] for one in ranks]).sum(0)
        servers = [one.server("a", 10 * one.rank, 10 * (one.rank + 1)) for one in ranks] if size == 2 else []
        server = torch.cat([values for values in servers if values is not None]) if servers else torch.zeros(20)
        assert torch.allclose((worker + server).view(4, 5), state["a"].sum(0), atol=1e-5)
        velocity = torch.stack([one.velocity["a"] for one in ranks]).sum(0)
        assert torch.allclose(velocity.view(4, 5), state["a/velocity"].sum(0), atol=1e-5)


def test_what_was_proposed_and_withdrawn_never_counts() -> None:
    residuals = Residuals(0, 1)
    for name in ("a", "b"):
        residuals.propose_worker(name, torch.ones(3))
        residuals.propose_velocity(name, torch.ones(3))
        residuals.propose_factor(name, torch.ones(3, 1))
        residuals.propose_server(name, 0, torch.ones(3))
    residuals.withdraw({"b"})
    residuals.commit()
    assert residuals.worker.keys() == residuals.velocity.keys() == residuals.factors.keys() == {"a"}
    assert residuals.server("a", 0, 3) is not None
    assert residuals.server("b", 0, 3) is None
    residuals.propose_nothing_left("a")
    assert "a" in residuals.worker
    residuals.commit()
    assert "a" not in residuals.worker
