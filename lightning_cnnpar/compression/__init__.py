"""Gradients on the wire in fewer bits, with error feedback.

gradients ─► policy: what is compressed how ─► + residual ─► encode ─► exchange ─► decode ─► sums
                                                    ▲             │
                                                    └── left out ─┘
"""

from lightning_cnnpar.compression.auto import choose_compressor
from lightning_cnnpar.compression.base import BlockwiseCompressor, Compressor
from lightning_cnnpar.compression.engine import CompressionEngine, CompressionStatistics, Part
from lightning_cnnpar.compression.onebit import OneBit
from lightning_cnnpar.compression.policy import COMPRESSORS, CompressionPolicy, from_name
from lightning_cnnpar.compression.powersgd import PowerSGD
from lightning_cnnpar.compression.quantize import BFloat16, Int2, Int4, Int8
from lightning_cnnpar.compression.topk import TopK

__all__ = [
    "COMPRESSORS",
    "BFloat16",
    "BlockwiseCompressor",
    "CompressionEngine",
    "CompressionPolicy",
    "CompressionStatistics",
    "Compressor",
    "Int2",
    "Int4",
    "Int8",
    "OneBit",
    "Part",
    "PowerSGD",
    "TopK",
    "choose_compressor",
    "from_name",
]
