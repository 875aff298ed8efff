"""Tells the Trainer's loggers what compressed gradients cost and save."""

from typing import Any

from lightning.pytorch import Callback

from lightning_cnnpar.compression import CompressionEngine

MEBIBYTE = 2**20


class CompressionLog(Callback):
    """Logs under `comm/...` as often as the Trainer logs; values are those of this rank's last step.

    Args:
        engine: Compresses gradients.
    """

    def __init__(self, engine: CompressionEngine) -> None:
        self._engine = engine

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log."""
        every = trainer.log_every_n_steps
        last = self._engine.last
        if not trainer.loggers or not last.steps or not every or (trainer.global_step % every):
            return
        values = {
            "comm/payload_mib": last.payload_bytes / MEBIBYTE,
            "comm/wire_mib": last.wire_bytes / MEBIBYTE,
            "comm/ratio": last.ratio,
            "comm/encode_ms": 1000 * last.encode_seconds,
            "comm/send_ms": 1000 * last.send_seconds,
            "comm/residual_norm": self._engine.residuals.norm(),
        }
        for logger in trainer.loggers:
            # On the row of the values that the Trainer logs for this step.
            logger.log_metrics(values, step=trainer.global_step - 1)
