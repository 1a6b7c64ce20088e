"""The phases of a batch, in order, as the view ``tidegate.batches`` derives them; the view decides, and nothing else."""

from typing import Literal, get_args

Phase = Literal["planned", "processing", "failed", "halted", "processed", "committed", "skipped"]
PHASES: tuple[Phase, ...] = get_args(Phase)
ENDED = ("committed", "skipped")
UNCOMMITTED = tuple(phase for phase in PHASES if phase not in ENDED)
