"""Log-probabilities of the tokens to train, with the LM head on nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from evenhand.core.arrays import FloatArray, IntArray
from evenhand.core.errors import ConfigError, require
from evenhand.training.batching import MicroBatch, Row, micro_batches
from evenhand.training.packing import PackedBatch, packed_batches
from evenhand.training.sharing import can_share, shared_attention

torch: Any = require("torch", "train", "training")

Tensor = Any
Model = Any


class TokenOutputs(NamedTuple):
    """What the model says about the targets of a micro-batch.

    Attributes:
        logprobs: `[n]` log-probabilities of the full softmax of `logits / temperature`, in
            float32 or wider.
        entropy: `[n]` entropies of that softmax, or `None` if not asked for.
    """

    logprobs: Tensor
    entropy: Tensor | None


@contextmanager
def head_on(model: Model, row: Tensor, position: Tensor) -> Iterator[None]:
    """Hand the LM head only the hidden states at `(row, position)`: `[1, n, H]` for `[B, L, H]`.

    Whatever the model does to its logits afterwards (scaling, soft capping) still happens. The
    memory and time of the head then follow the trained tokens, not prompts and retrieved text.
    """
    head = model.get_output_embeddings()
    if head is None:
        raise ConfigError(f"{type(model).__name__} has no output embeddings; use a causal LM")

    def select(_module: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (inputs[0][row, position].unsqueeze(0), *inputs[1:])

    handle = head.register_forward_pre_hook(select)
    try:
        yield
    finally:
        handle.remove()


@dataclass(frozen=True)
class Forward:
    """A model and how to run it.

    Attributes:
        model: a causal language model.
        device: where it lives.
        temperature: of the sampler.
        autocast: makes the context of the forward pass (bf16, or nothing).
    """

    model: Model
    device: Any
    temperature: float = 1.0
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext

    @cached_property
    def shares(self) -> bool:
        """Whether rows that begin alike are computed together; see `sharing.can_share`."""
        return self.autocast is nullcontext and can_share(self.model)

    def batches(self, rows: Sequence[Row], max_tokens: int) -> Sequence[MicroBatch | PackedBatch]:
        """Cut rows into what one call takes; see `packed_batches` and `micro_batches`."""
        return (packed_batches if self.shares else micro_batches)(rows, max_tokens)

    def __call__(self, batch: MicroBatch | PackedBatch, *, entropy: bool = False) -> TokenOutputs:
        """Run a micro-batch; the gradient is kept if torch keeps gradients."""
        if isinstance(batch, MicroBatch):
            logits = self._padded(batch)
            return self._outputs(logits, self.tensor(batch.targets.ids), entropy=entropy)
        logits = self._packed(batch)
        found = self._outputs(logits, self.tensor(batch.predicted), entropy=entropy)
        pairs = self.tensor(batch.pairs)
        return TokenOutputs(*(None if each is None else each[pairs] for each in found))

    def backward(self, loss: Tensor, batch: MicroBatch | PackedBatch) -> None:
        """Add the gradient of a loss of `batch`."""
        # Layers that recompute their activations (in training mode only) attend once more.
        if isinstance(batch, PackedBatch) and self.model.training:
            with shared_attention(self.model, batch):
                loss.backward()
        else:
            loss.backward()

    def _padded(self, batch: MicroBatch) -> Tensor:
        """Return the logits `[n, V]` that predict the targets."""
        row = self.tensor(batch.row)
        position = self.tensor(batch.targets.position - 1)
        with head_on(self.model, row, position), self.autocast():
            # Positions are counted from 0 and padding is on the right: no mask is needed.
            return self.model(input_ids=self.tensor(batch.ids), use_cache=False).logits[0]

    def _packed(self, batch: PackedBatch) -> Tensor:
        """Return the logits `[p, V]` that predict the pairs."""
        places = self.tensor(batch.predictors)
        with (
            head_on(self.model, torch.zeros_like(places), places),
            shared_attention(self.model, batch),
        ):
            return self.model(
                input_ids=self.tensor(batch.ids)[None],
                position_ids=self.tensor(batch.positions)[None],
                use_cache=False,
            ).logits[0]

    def _outputs(self, logits: Tensor, target: Tensor, *, entropy: bool) -> TokenOutputs:
        # At least float32: a softmax over half precision would be noise.
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.temperature != 1:
            logits = logits / self.temperature
        logprobs = -torch.nn.functional.cross_entropy(logits, target, reduction="none")
        if not entropy:
            return TokenOutputs(logprobs, None)
        full = logits.log_softmax(-1)
        return TokenOutputs(logprobs, -(full.exp() * full).sum(-1))

    def logprobs(self, rows: Sequence[Row], max_tokens: int) -> list[FloatArray]:
        """Return `[n]` log-probabilities of the targets of each row, without gradient."""
        found: dict[int, FloatArray] = {}
        with torch.no_grad():
            for batch in self.batches(rows, max_tokens):
                values = self(batch).logprobs.double().cpu().numpy()
                cuts = np.cumsum([len(row.targets) for row in batch.members])[:-1]
                for row, part in zip(batch.members, np.split(values, cuts), strict=True):
                    found[row.index] = part
        return [found[row.index] for row in rows]

    def tensor(self, values: IntArray | FloatArray) -> Tensor:
        """Return an array on the device; whole numbers stay whole, others become float32."""
        tensor = torch.from_numpy(np.ascontiguousarray(values))
        return (tensor if tensor.dtype == torch.int64 else tensor.float()).to(self.device)
