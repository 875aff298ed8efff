"""Loaders with layers: what changes and what doesn't."""

import copy
import pickle

import pytest
from torch.utils.data import DataLoader

from lightning_cnnpar.mirror.layers import Layer, add_layer, copy_loader


class Doubling(Layer):
    def iterate(self, start, loader):
        self.loader = loader
        return (batch * 2 for batch in start())


class Adding(Layer):
    def iterate(self, start, loader):
        return (batch + 1 for batch in start())


class Own(DataLoader):
    """A loader of the user's."""

    def __init__(self, path):
        self.path = path
        super().__init__([1, 2, 3], batch_size=None)

    def __iter__(self):
        for batch in super().__iter__():
            yield batch + 10

    def __len__(self):
        return 30

    def hello(self):
        return f"hello {self.path}"


def test_layers_come_after_the_users_own_iteration_in_order():
    loader = Own("here")
    layered = add_layer(add_layer(loader, Doubling()), Adding())
    assert list(layered) == [23, 25, 27]
    assert list(loader) == [11, 12, 13]
    assert list(add_layer(add_layer([1, 2], Doubling()), Adding())) == [3, 5]


def test_a_loader_stays_what_it_is():
    layer = Doubling()
    layered = add_layer(Own("here"), layer)
    assert isinstance(layered, Own)
    assert (type(layered).__name__, type(layered).__module__) == ("Own", __name__)
    assert (len(layered), layered.hello(), layered.dataset) == (30, "hello here", [1, 2, 3])
    assert type(add_layer(Own("there"), layer)) is type(layered)
    next(iter(layered))
    assert layer.loader is layered


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
def test_copies_are_of_the_users_loader(duplicate):
    layered = add_layer(Own("here"), Doubling())
    copied = duplicate(layered)
    assert type(copied) is Own
    assert list(copied) == [11, 12, 13]
    assert list(layered) == [22, 24, 26]


def test_attributes_that_cannot_be_set():
    loader = Own("here")
    with pytest.raises(ValueError, match="attribute should not be set"):
        loader.dataset = [5, 6, 7]
    assert list(copy_loader(loader, dataset=[5, 6, 7])) == [15, 16, 17]
    layered = copy_loader(add_layer(loader, Doubling()), dataset=[6, 7, 8])
    assert list(layered) == [32, 34, 36]
    assert list(loader) == [11, 12, 13]


def test_other_iterables_are_wrapped():
    class Source:
        name = "source"

        def __iter__(self):
            return iter([1, 2])

    layered = add_layer(Source(), Doubling())
    assert list(layered) == [2, 4]
    assert layered.name == "source"
    with pytest.raises(TypeError):
        len(layered)
    assert len(add_layer([1, 2], Doubling())) == 2
    assert not hasattr(layered, "batch_size")
    assert list(copy.copy(layered)) == [2, 4]
