"""What the model's end hands to a loss: values of each token of a micro-batch, though tp ranks hold parts of logits.

Nothing is gathered until it is asked for, and then a few numbers of each token, but by `logits` and `hidden`. What is
asked for twice is computed once. All of it is equal on every tp rank, and differentiable: each rank's loss is the loss.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from tpkernels.exchange.communicator import Communicator

from tpengine.config import IGNORED_LABEL
from tpengine.layers.rows import Documents
from tpengine.layers.token_values import entropy, token_logprobs, whole_logits, whole_rows
from tpengine.layers.vocabulary import vocab_parallel_cross_entropy


class LastOutput:
    """The output of the last stage for one micro-batch of T tokens.

    Args:
        logits: z[T, V/tp], this rank's columns; in exact mode z[n, T, V/(n tp)].
        vocab_size: V, without padding.
        tp: the tp ranks.
        documents: those that are packed into the micro-batch; the length of its sequences where each is one.
        hidden: x[T/tp, D] in front of the head; None where nobody has kept it.
        rows: int64 [T]: which of the micro-batch's tokens this output is of, where it is a part of one; None for all.

    Every method must be called on all tp ranks in the same order, since most gather.
    """

    def __init__(
        self,
        logits: Tensor,
        vocab_size: int,
        tp: Communicator,
        documents: Documents | int,
        hidden: Tensor | None = None,
        rows: Tensor | None = None,
    ) -> None:
        self._logits, self._vocab_size, self._tp = logits, vocab_size, tp
        self._documents, self._hidden, self._rows = documents, hidden, rows
        # By name, labels and whether autograd recorded it. Labels are kept, so that an id is theirs.
        self._known: dict[tuple[str, int, bool], tuple[Tensor | None, Tensor]] = {}
        self._has_read_logits = False

    @property
    def has_read_logits(self) -> bool:
        """Whether autograd has recorded something of the logits."""
        return self._has_read_logits

    @property
    def num_tokens(self) -> int:
        """T."""
        return self._logits.shape[-2] if self._rows is None else len(self._rows)

    def cross_entropy(
        self,
        labels: Tensor,
        weights: Tensor | None = None,
        *,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        overwrites: bool = False,
    ) -> Tensor:
        """Return the sum over valid labels of weights[t] * -log softmax(z[t])[labels[t]], and what is added to it.

        Args:
            labels: int64 [T], -100 where ignored.
            weights: [T]; default ones.
            label_smoothing, z_loss: as layers.vocab_parallel_cross_entropy.
            overwrites: let backward write the gradient over the logits: right where the loss asks this output for
                nothing else, and then spares memory of the logits' size.

        Returns: [] in promote_types(dtype, float32).
        """
        self._note_logits()
        return vocab_parallel_cross_entropy(
            self._logits,
            self._of_all(labels, IGNORED_LABEL, "labels"),
            self._vocab_size,
            self._tp,
            weights=None if weights is None else self._of_all(weights, 0, "weights"),
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            keeps_logits=not overwrites,
        )

    def token_logprobs(self, labels: Tensor) -> Tensor:
        """Return log softmax(z[t])[labels[t]] of each token, [T]; 0 where the label is -100.

        Cost: a gather of 4*T numbers; backward makes a tensor of the logits' size.
        """

        def compute() -> Tensor:
            of_all = self._of_all(labels, IGNORED_LABEL, "labels")
            self._note_logits()
            return self._part(token_logprobs(self._logits, of_all, self._vocab_size, self._tp))

        return self._once("logprobs", labels, compute)

    def entropy(self) -> Tensor:
        """Return -sum over v of q log q, q = softmax(z[t]), of each token, [T], in nats.

        Cost: a gather of 3*T numbers; backward makes a tensor of the logits' size.
        """

        def compute() -> Tensor:
            self._note_logits()
            return self._part(entropy(self._logits, self._vocab_size, self._tp))

        return self._once("entropy", None, compute)

    def logits(self) -> Tensor:
        """Return the logits of all columns, z[T, V], in their dtype.

        Cost: dear: every rank gathers and holds T*V elements, which `token_logprobs` and `entropy` spare.
        """

        def compute() -> Tensor:
            self._note_logits()
            return self._part(whole_logits(self._logits, self._vocab_size, self._tp))

        return self._once("logits", None, compute)

    def hidden(self) -> Tensor:
        """Return the hidden states in front of the head, behind the last norm: x[T, D], in the model's dtype.

        Cost: a gather of T*D elements.
        """
        hidden = self._hidden
        assert hidden is not None, "whoever makes an output for a loss of a user's keeps the hidden states"
        return self._once("hidden", None, lambda: self._part(whole_rows(hidden, self._tp)))

    def sum_by_document(self, values: Tensor) -> Tensor:
        """Return the sum of values[T] over the tokens of each document, [documents], in their order.

        Where sequences are packed, padding at a sequence's end counts as a document; else each sequence is one.
        """
        self._check(values, "values")
        if isinstance(self._documents, int):
            return values.view(-1, self._documents).sum(1)
        # On any device in the order of tokens, so that the bits are always the same.
        lengths = self._documents.starts.diff().long()
        return torch.segment_reduce(values, "sum", lengths=lengths, unsafe=True)

    def of_rows(self, rows: Tensor, documents: Documents | int) -> LastOutput:
        """Return the output of some of the tokens.

        Args:
            rows: int64, ascending: which.
            documents: those of these tokens.
        """
        assert self._rows is None, "a part of an output has no parts"
        return LastOutput(self._logits, self._vocab_size, self._tp, documents, self._hidden, rows)

    def _once(self, name: str, labels: Tensor | None, compute: Callable[[], Tensor]) -> Tensor:
        """Return what was computed before; what autograd has not recorded is no answer where it records."""
        for recorded in {torch.is_grad_enabled(), True}:
            if (name, id(labels), recorded) in self._known:
                return self._known[name, id(labels), recorded][1]
        values = compute()
        self._known[name, id(labels), torch.is_grad_enabled()] = labels, values
        return values

    def _note_logits(self) -> None:
        self._has_read_logits |= torch.is_grad_enabled()

    def _part(self, of_all: Tensor) -> Tensor:
        return of_all if self._rows is None else of_all[self._rows]

    def _of_all(self, values: Tensor, elsewhere: float, what: str) -> Tensor:
        """Return values of all tokens of the micro-batch."""
        self._check(values, what)
        if self._rows is None:
            return values
        of_all = values.new_full(self._logits.shape[-2:-1], elsewhere)
        of_all[self._rows] = values
        return of_all

    def _check(self, values: Tensor, what: str) -> None:
        if values.shape != (self.num_tokens,):
            raise ValueError(
                f"{what} are one of each token of the micro-batch: got {tuple(values.shape)} for {self.num_tokens} "
                "tokens: pass all of them, and let labels of -100, or weights of 0, leave some out"
            )
