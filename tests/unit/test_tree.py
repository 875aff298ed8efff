"""Containers are taken apart and put back as they were."""

import pickle
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable
from dataclasses import FrozenInstanceError, dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_cnnpar.tree import LEAF, flatten, map_leaves, map_tensors, unflatten


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass
class Sample:
    image: Any
    label: Any = None


@dataclass(frozen=True, kw_only=True)
class Frozen:
    image: Any
    size: int = field(init=False, default=3)

    def __post_init__(self) -> None:
        raise AssertionError("a copy must not run this again")


@dataclass
class Cached:
    image: Any
    norm: Any = field(init=False)


def _frozen(image: Any) -> Frozen:
    frozen = object.__new__(Frozen)
    object.__setattr__(frozen, "image", image)
    object.__setattr__(frozen, "size", 7)
    return frozen


CONTAINERS: list[tuple[Any, list[Any]]] = [
    (1, [1]),
    (None, [None]),
    ("text", ["text"]),
    ((), []),
    ([], []),
    ({}, []),
    ((1, [2, (3,)]), [1, 2, 3]),
    ({"b": 1, "a": {"c": (2,)}}, [1, 2]),
    ({2: "two", (1, 2): "pair"}, ["two", "pair"]),
    (OrderedDict(b=1, a=2), [1, 2]),
    (Pair(1, Pair(2, None)), [1, 2, None]),
    (Sample(image=[1, 2], label="cat"), [1, 2, "cat"]),
    (_frozen(1), [1, 7]),
    ({"x": Sample(image=Pair(1, 2))}, [1, 2, None]),
    (Sample, [Sample]),
]


@pytest.mark.parametrize(("tree", "leaves"), CONTAINERS, ids=repr)
def test_leaves_come_in_order_and_go_back(tree: Any, leaves: list[Any]) -> None:
    found, spec = flatten(tree)
    assert found == leaves
    assert spec.num_leaves == len(leaves)
    rebuilt = unflatten(spec, found)
    assert rebuilt == tree
    assert type(rebuilt) is type(tree)


@pytest.mark.parametrize("tree", [tree for tree, _ in CONTAINERS], ids=repr)
def test_specs_are_keys_that_travel(tree: Any) -> None:
    _, spec = flatten(tree)
    assert pickle.loads(pickle.dumps(spec)) == spec
    assert isinstance(spec, Hashable)
    assert {spec: 1}[flatten(tree)[1]] == 1


def test_specs_tell_containers_apart() -> None:
    trees: list[Any] = [1, (1,), [1], {"a": 1}, {"b": 1}, Pair(1, 1), (1, 1), Sample(1), OrderedDict(a=1), ((1,),)]
    assert len({flatten(tree)[1] for tree in trees}) == len(trees)
    assert flatten("any leaf")[1] == LEAF


def test_a_defaultdict_comes_back_as_a_dictionary_with_its_items() -> None:
    leaves, spec = flatten(defaultdict(list, a=1, b=2))
    assert unflatten(spec, leaves) == {"a": 1, "b": 2}


def test_a_dataclass_comes_back_without_running_its_code() -> None:
    rebuilt = map_leaves(lambda leaf: leaf + 1, _frozen(1))
    assert (rebuilt.image, rebuilt.size) == (2, 8)
    with pytest.raises(FrozenInstanceError):
        rebuilt.image = 3


def test_a_field_that_is_not_set_stays_so() -> None:
    leaves, spec = flatten(Cached(image=1))
    assert leaves == [1]
    assert vars(unflatten(spec, leaves)) == {"image": 1}


def test_the_number_of_leaves_has_to_fit() -> None:
    _, spec = flatten((1, 2))
    with pytest.raises(ValueError, match="takes 2 leaves, 3 were given"):
        unflatten(spec, [1, 2, 3])


def test_map_tensors_leaves_the_rest_alone() -> None:
    batch = {"x": torch.ones(2), "name": "one", "more": [None, torch.zeros(1)]}
    doubled = map_tensors(lambda tensor: tensor * 2, batch)
    assert doubled["x"].tolist() == [2, 2]
    assert doubled["name"] is batch["name"]
    assert doubled["more"][0] is None


def _containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    build: Callable[..., Any] = Sample
    return (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=2), inner, max_size=3)
        | st.tuples(inner, inner).map(lambda pair: Pair(*pair))
        | st.tuples(inner, inner).map(lambda pair: build(*pair))
    )


@given(st.recursive(st.integers() | st.none() | st.text(max_size=2), _containers, max_leaves=12))
def test_any_nesting_goes_there_and_back(tree: Any) -> None:
    leaves, spec = flatten(tree)
    assert len(leaves) == spec.num_leaves
    assert unflatten(spec, leaves) == tree
    assert flatten(unflatten(spec, range(len(leaves))))[0] == list(range(len(leaves)))
