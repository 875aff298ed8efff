import pytest
import torch

from lightning_cnnpar.mirror import step_generators
from lightning_cnnpar.pipeline.ambient import Ambient
from lightning_cnnpar.pipeline.coroutine import Coroutine, suspend

CPU = torch.device("cpu")


def test_a_function_is_left_and_gone_on_with() -> None:
    def function() -> str:
        return f"{suspend('first')} {suspend('second')}"

    coroutine = Coroutine(function, CPU)
    assert coroutine.resume() == "first"
    assert not coroutine.finished
    assert coroutine.resume("a") == "second"
    assert coroutine.resume("b") == "a b"
    assert coroutine.finished


def test_autocast_grad_mode_and_default_type_belong_to_the_coroutine() -> None:
    seen = []

    def function() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
            torch.set_default_dtype(torch.float64)
            suspend(None)
            seen.append(Ambient.capture(CPU))
            torch.set_default_dtype(torch.float32)

    one, two = Coroutine(function, CPU), Coroutine(function, CPU)
    outside = Ambient.capture(CPU)
    one.resume()
    assert Ambient.capture(CPU) == outside
    two.resume()
    one.resume()
    assert Ambient.capture(CPU) == outside
    two.resume()
    assert seen == [one_state := seen[0]] * 2
    assert one_state.autocast["cpu"] == (True, torch.bfloat16)
    assert one_state.dtype == torch.float64
    assert not one_state.grad


def test_errors_come_out_where_it_was_resumed() -> None:
    def function() -> None:
        suspend(None)
        raise ValueError("inside")

    coroutine = Coroutine(function, CPU)
    coroutine.resume()
    with pytest.raises(ValueError, match="inside"):
        coroutine.resume()
    assert coroutine.finished


def test_a_coroutine_that_is_closed_leaves_its_blocks() -> None:
    left = []

    def function() -> None:
        try:
            suspend(None)
        finally:
            left.append(True)

    coroutine = Coroutine(function, CPU)
    coroutine.resume()
    coroutine.close()
    assert left == [True]


def test_each_draws_its_own_numbers_in_any_order() -> None:
    def draws(order: str) -> tuple[dict[str, list[float]], float]:
        torch.manual_seed(3)
        found: dict[str, list[float]] = {"a": [], "b": []}

        def function(name: str) -> None:
            found[name].append(float(torch.rand(())))
            suspend(None)
            found[name].append(float(torch.rand(())))

        generators = step_generators(2, CPU)
        both = {
            "a": Coroutine(lambda: function("a"), CPU, generators[0]),
            "b": Coroutine(lambda: function("b"), CPU, generators[1]),
        }
        for name in order:
            both[name].resume()
        return found, float(torch.rand(()))

    assert draws("aabb") == draws("abab") == draws("baab")
    found, outside = draws("aabb")
    assert len({*found["a"], *found["b"], outside}) == 5
