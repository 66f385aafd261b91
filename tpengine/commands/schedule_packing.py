"""`tpengine schedule --data.path`: the documents of a text, sampled, and what micro-batches of them cost. No torch."""

from __future__ import annotations

import numpy as np
from tpkernels.work import visible_pairs

from tpengine.architectures.part import Packed, packed_of
from tpengine.config import Config
from tpengine.data.fit_index import open_index
from tpengine.data.samples import Samples, fitted
from tpengine.data.source import open_text
from tpengine.data.source_files import DocumentSourceTokens
from tpengine.data.stored_tokens import DocumentTokens
from tpengine.data.text_corpus import num_trained_on
from tpengine.layout.step_plan import Layout
from tpengine.plan import Kind, Plan
from tpengine.planner.machine import Machine
from tpengine.planner.modelled.costs import model_costs

# Sequences that are looked at: the first ones of the run's own order, which is a random one.
_MOST_SAMPLES = 4096


def packed_documents(config: Config) -> Packed:
    """Return the documents of the first micro-batches of a run's order.

    Args:
        config: validated; data, train.seq_len, micro_batch_size and seed are used.

    Raises:
        ValueError: an unreadable text, one that does not say where documents begin, or too short a one.

    Cost: a search for each of at most 4,096 sequences; no scan.
    """
    text, train, data = open_text(config.data.path), config.train, config.data
    if not isinstance(text.tokens, DocumentTokens | DocumentSourceTokens):
        raise ValueError(
            f"the cost of packed documents needs to know where they begin: {data.path} does not say: write it "
            "again with tpengine data, or leave --data.path out"
        )
    num_train = num_trained_on(text.tokens, data.held_out_share)
    tokens = text.tokens.part(0, num_train)
    samples = Samples(tokens, train.seq_len, config.model.vocab_size, seed=train.seed, packs=True)
    if data.packing == "fit":
        index = open_index(text, data.path, train.seq_len, num_train, data.held_out_share)
        samples = fitted(samples, index.train)
    if samples.num_windows < train.micro_batch_size:
        raise ValueError(
            f"a text must fill a micro-batch: {data.path} has {samples.num_windows} sequences of {train.seq_len} "
            f"tokens to train on, a micro-batch {train.micro_batch_size}: use more text or shorter sequences"
        )
    count = min(samples.num_windows, max(_MOST_SAMPLES, train.micro_batch_size))
    starts = samples.document_starts(np.arange(count, dtype=np.int64))
    return packed_of([of.tolist() for of in starts], train.seq_len, train.micro_batch_size)


def packing_in_words(packed: Packed, config: Config, layout: Layout, plan: Plan, rates: Machine) -> list[str]:
    """Return what the sampled documents are, and what a micro-batch of them costs: the mean, the worst, and uncut."""
    train = config.train
    lengths = np.array([length for of in packed.lengths for length in of])
    median, longest = int(np.median(lengths)), int(lengths.max())
    uncut = visible_pairs([train.seq_len]) * train.micro_batch_size
    mean, worst = packed.pairs(), packed.worst.pairs()
    whole = Packed(((train.seq_len,) * train.micro_batch_size,))
    seconds = [_slowest(config, layout, plan, rates, of) for of in (packed, packed.worst, whole)]
    return [
        f"documents of {config.data.path}: {len(lengths):,} parts in {len(packed.lengths):,} sampled micro-batches, "
        f"median {median:,} tokens, longest {longest:,} of {train.seq_len:,}",
        f"attention's pairs of a micro-batch: mean {mean:,} ({mean / uncut:.0%} of uncut sequences), worst {worst:,} "
        f"({worst / uncut:.0%})",
        f"F and B of a micro-batch on the slowest stage: mean {seconds[0]:.4g} s, worst {seconds[1]:.4g} s, uncut "
        f"{seconds[2]:.4g} s",
    ]


def _slowest(config: Config, layout: Layout, plan: Plan, rates: Machine, packed: Packed) -> float:
    """Return what all computation of a micro-batch takes on the stage where it takes longest."""
    compute = model_costs(config, layout, plan, rates, packed=packed).compute
    kinds = (Kind.F, Kind.B) if any(kind is Kind.B for kind, _ in compute) else (Kind.F, Kind.I, Kind.W)
    of_rank = [0.0] * plan.num_ranks
    for (kind, chunk), seconds in compute.items():
        if kind in kinds:
            of_rank[plan.chunks[chunk].rank] += seconds
    return max(of_rank)
