"""Train convolutional networks on many devices with PyTorch Lightning, without changing the `LightningModule`.

Importing the package registers the strategy names, `Trainer(strategy="cnnpar_hybrid")` among them.
"""

from lightning_cnnpar.config import ConfigurationError, NumaBinding
from lightning_cnnpar.partition.foreign import ForeignTensorError
from lightning_cnnpar.partition.split import Partition, split
from lightning_cnnpar.plan import ParallelPlan
from lightning_cnnpar.plugins.precision import HybridPrecision
from lightning_cnnpar.strategies.hybrid import HybridStrategy
from lightning_cnnpar_autoload import register

__all__ = [
    "ConfigurationError",
    "ForeignTensorError",
    "HybridPrecision",
    "HybridStrategy",
    "NumaBinding",
    "ParallelPlan",
    "Partition",
    "split",
]

register()
