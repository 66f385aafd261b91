"""`tpengine certify`: start its own processes, compare them, print what was found. No torch.

Exit code 0 if the layouts gave the same bits (with --fast: every distance is within its bound), 1 if not.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.table import Table

from tpengine.architectures.model_path import model_at
from tpengine.commands.certify_compare import (
    FACTOR,
    Difference,
    Distance,
    Distances,
    ReplicasDiffer,
    StepEvidence,
    Tensors,
    assembled,
)
from tpengine.config import Config, ParallelConfig, num_shards_of, phases_of, shards_said, validate, validate_run
from tpengine.config.exact_sizes import largest_dp
from tpengine.config.lengths import MOST_STEPS
from tpengine.config.presets import PRESETS
from tpengine.config.ranges import nearest_of
from tpengine.config.rules import legal_ep
from tpengine.data import open_corpora
from tpengine.distributed.local_ranks import Ranks
from tpengine.layout.parameters import num_parameters
from tpengine.observe.safe_console import SafeConsole
from tpengine.plan import SCHEDULES, make_schedule
from tpengine.spelling import use

# More processes would not show more, and each takes about 0.3 GB.
_MOST_PROCESSES = 64
# Three runs in float64, and one more copy in transit: 4 GB.
_MOST_COMPARED = 50_000_000
_TABLE_WIDTH = 120
# Leaves every weight unchanged: then steps differ only by their data and their dropout.
_NO_LEARNING = 1e-30
_WITNESS = "tpengine.commands.certify_witness:Witness"
_GRADIENTS = "tpengine.commands.certify_witness:Gradients"


@dataclass(frozen=True)
class CertifiedLayout:
    """Sizes of the axes tp, pp and dp, the stage of ZeRO, and the ranks that share experts."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    zero: int = 0
    ep: int = 1

    @property
    def num_ranks(self) -> int:
        """Processes."""
        return self.tp * self.pp * self.dp

    def __str__(self) -> str:
        if self.num_ranks == 1:
            return "one process"
        zero, ep = f", zero {self.zero}" if self.zero else "", f", ep {self.ep}" if self.ep > 1 else ""
        return f"tp {self.tp} x pp {self.pp} x dp {self.dp}{ep}{zero}"


@dataclass(frozen=True)
class CertifyOptions:
    """What to certify; see the command's help.

    Attributes:
        dp_follows_ep: whether nobody named the layout's dp, so that it is what ep needs.
    """

    layout: CertifiedLayout
    against: CertifiedLayout | None
    preset: str
    model_path: str | None
    dtype: str
    schedule: str
    tp_comm: str
    seed: int
    steps: int
    fast: bool
    data_path: str | None = None
    mixture: str = ""
    packing: Literal["cut", "documents", "fit"] = "cut"
    phases: str = ""
    architecture: str = ""
    balance: Literal["none", "loss", "bias"] = "none"
    dp_follows_ep: bool = False


def certify(options: CertifyOptions, witness: str = _WITNESS, gradients: str = _GRADIENTS) -> int:
    """Compare, print, and return the exit code.

    Args:
        options: what to compare.
        witness, gradients: what each rank constructs; tests give others to break the engine on purpose.

    Raises:
        ValueError: a layout that is not possible, or two equal layouts.
        RanksFailed: a rank raised or died.
    """
    _check(options)
    if options.fast:
        return _compare_fast(options, gradients)
    layouts = (options.layout, options.against or CertifiedLayout())
    # Every phase is legal in both layouts before the first is trained.
    left, right = (_phases(options, layout) for layout in layouts)
    for number, configs in enumerate(zip(left, right, strict=True), 1):
        if options.phases:
            print(f"phase {number} of {len(left)}, from drawn weights:")
        if code := _compare_bits(options, layouts, configs, witness):
            return code
    print("certified: identical")
    return 0


def parse_layout(text: str) -> CertifiedLayout:
    """Parse "tp=4,pp=1,dp=2,ep=4,zero=3": each at most once; what is not named has size 1, and zero is 0.

    Raises:
        ValueError: the text is not of that form.
    """
    found = re.findall(r"(tp|pp|dp|ep|zero)=([1-9]\d*)", text)
    sizes = {axis: int(size) for axis, size in found}
    if not found or len(sizes) < len(found) or ",".join(f"{axis}={size}" for axis, size in found) != text:
        raise ValueError(f"a layout names tp, pp and dp with their sizes: got {text!r}: use tp=4,pp=1,dp=1")
    return CertifiedLayout(**sizes)


def base_of(options: CertifyOptions) -> Config:
    """Return the preset, with the model of a directory if one is given; its weights are drawn as any others."""
    base = PRESETS[options.preset]()
    path = base.data.path if options.data_path is None else options.data_path
    base = replace(base, data=replace(base.data, path=path, mixture=options.mixture, packing=options.packing))
    if options.architecture:
        base = replace(base, model=replace(base.model, architecture=options.architecture))
    if options.model_path is None:
        return base
    model = replace(model_at(replace(base.model, path=options.model_path)), path="")
    # A table of learned positions may be shorter than the preset's sequences.
    seq_len = min(base.train.seq_len, model.details.max_positions or base.train.seq_len)
    return replace(base, model=model, train=replace(base.train, seq_len=seq_len))


def _name_of(options: CertifyOptions) -> str:
    return f"preset {options.preset}" if options.model_path is None else f"model {options.model_path}"


def _check(options: CertifyOptions) -> None:
    for flag, value, choices in (
        ("--preset", options.preset, tuple(PRESETS)),
        ("--dtype", options.dtype, ("float32", "bfloat16", "float64")),
        ("--tp-comm", options.tp_comm, ("fused", "plain")),
    ):
        if value not in choices:
            raise ValueError(f"{flag} must be one of {', '.join(choices)}: got {value!r}: {use(value, choices)}")
    if options.schedule not in SCHEDULES:
        # A schedule file is read for its own layout; a value that is neither a name nor a file is refused there too.
        num_micro_batches = base_of(options).train.num_micro_batches // options.layout.dp
        make_schedule(options.schedule, options.layout.pp, num_micro_batches)
    if not 0 <= options.seed < 2**63:
        raise ValueError(f"--seed must be at least 0 and below 2**63: got {options.seed}: use 0")
    if options.fast:
        if options.phases:
            raise ValueError(f"--fast compares one phase: got --phases {options.phases}: leave it out")
        if options.against is not None:
            raise ValueError(
                f"--fast compares with exact mode in one process: got --against {options.against}: leave it out"
            )
        if options.dtype == "float64":
            raise ValueError("--fast takes float64 as the truth: got --dtype float64: use float32 or bfloat16")
        if (size := num_parameters(base_of(options).model)) > _MOST_COMPARED:
            raise ValueError(
                f"--fast compares gradients in one process, of at most {_MOST_COMPARED:,} parameters: "
                f"{_name_of(options)} has {size:,}: use certify, or bench"
            )
    elif options.layout == (options.against or CertifiedLayout()):
        raise ValueError(
            f"certify needs two layouts: both are {options.layout}: choose another --tp, --pp, --dp, --ep or --against"
        )
    for layout in (options.layout, options.against or CertifiedLayout()):
        if layout.num_ranks > _MOST_PROCESSES:
            raise ValueError(
                f"certify starts its processes here, at most {_MOST_PROCESSES}: {layout} needs {layout.num_ranks}: "
                "choose a smaller layout"
            )


def config_of(options: CertifyOptions, layout: CertifiedLayout, **train: Any) -> Config:
    """Return the configuration that a layout trains: the preset with the same global batch, checked.

    Args:
        train: settings of the train section that replace those of the options, which set exact mode.

    Raises:
        ValueError: sizes that do not divide; see config.validate.
    """
    base = base_of(options)
    _check_sizes(base, layout, _name_of(options), dp_follows_ep=options.dp_follows_ep and layout == options.layout)
    in_all = base.train.num_micro_batches
    train = {"reduction": "exact", "dtype": options.dtype, **train}
    config = replace(
        base,
        parallel=ParallelConfig(
            layout.tp,
            layout.pp,
            layout.dp,
            # A schedule file fits one number of ranks and micro-batches: the other layout takes the default.
            ep=layout.ep,
            zero=cast(Literal[0, 1, 2, 3], layout.zero),
            schedule=options.schedule if options.schedule in SCHEDULES or layout == options.layout else "1f1b",
            tp_comm=cast(Literal["fused", "plain"], options.tp_comm),
        ),
        train=replace(
            base.train,
            num_micro_batches=in_all // layout.dp,
            steps=max(base.train.steps, options.steps),
            seed=options.seed,
            balance=options.balance,
            **train,
        ),
        device="cpu",
    )
    return validate(config, layout.num_ranks)


def _check_sizes(base: Config, layout: CertifiedLayout, name: str, *, dp_follows_ep: bool) -> None:
    """Refuse what a layout cannot be with a preset or a model, called `name`, by what the user has named."""
    shards, replicas = num_shards_of(base), largest_dp(base.train.num_micro_batches)
    if layout.ep > 1 and not base.model.details.num_experts:
        raise ValueError(f"ep shares out the experts of a model: ep {layout.ep}, and {name} has none: use ep 1")
    if dp_follows_ep and replicas % layout.dp and shards % layout.tp == 0:
        train = replace(base.train, reduction="exact")
        legal = legal_ep(replace(base, parallel=ParallelConfig(layout.tp, 1, replicas), train=train))
        raise ValueError(
            f"without --dp there are as many replicas as --ep needs, and they must divide {replicas} with {name}: got "
            f"ep {layout.ep}, which needs {layout.dp} with tp {layout.tp}: use {nearest_of('ep', layout.ep, legal)}"
        )
    for axis, size, most in (("tp", layout.tp, shards), ("dp", layout.dp, replicas)):
        if most % size:
            legal = [n for n in range(1, most + 1) if most % n == 0]
            why = f" ({shards_said(base)})" if axis == "tp" and most == 1 else ""
            raise ValueError(
                f"{axis} must divide {most} with {name}{why}: got {axis} {size}: use "
                f"{min(legal, key=lambda n: (abs(n - size), -n))}"
            )
    if layout.pp > base.model.num_layers:
        raise ValueError(
            f"every pipeline stage needs a layer: {name} has {base.model.num_layers}, got pp {layout.pp}: use "
            f"{base.model.num_layers}"
        )


@contextlib.contextmanager
def _progress(num_steps: int) -> Iterator[Callable[[str], Any]]:
    """Show one progress line on standard error, removed at the end, with the part of `num_steps` that is done."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with SafeConsole(stderr=True).progress(*columns) as progress:
        task = progress.add_task("starting", total=num_steps)
        yield lambda what: progress.update(task, advance=1, description=what)


def _phases(options: CertifyOptions, layout: CertifiedLayout) -> list[Config]:
    """Return what a layout trains: the configuration, or that of each phase, by itself."""
    config = config_of(options, layout)
    if not options.phases:
        return [config]
    config = replace(config, phases=options.phases)
    # A last phase without `until` is as long as a run of the preset; --steps are those that are compared.
    begins = phases_of(replace(config, train=replace(config.train, steps=MOST_STEPS)))[-1].first_step
    config = replace(config, train=replace(config.train, steps=begins + config.train.steps))
    phases = phases_of(validate_run(config, layout.num_ranks))
    return [replace(phase.config, phases="") for phase in phases]


def _compare_bits(
    options: CertifyOptions, layouts: tuple[CertifiedLayout, CertifiedLayout], configs: tuple[Config, ...], witness: str
) -> int:
    # A text that cannot be read is one line, before ranks meet it.
    open_corpora(phases_of(replace(configs[0], train=replace(configs[0].train, steps=options.steps))))
    _say(options, configs[0], f"{layouts[0]} against {layouts[1]}, exact mode")
    with contextlib.ExitStack() as stack:
        advance = stack.enter_context(_progress(2 * options.steps))
        runs = [
            stack.enter_context(Ranks(layout.num_ranks, witness, config))
            for layout, config in zip(layouts, configs, strict=True)
        ]
        for step in range(options.steps):
            (left, loss), (right, _) = (
                _evidence(ranks, step, layout, advance) for ranks, layout in zip(runs, layouts, strict=True)
            )
            _show_groups(step, loss, left, right)
            if found := verdict(left, right, *layouts):
                print(f"not identical: {found}")
                return 1
    return 0


def verdict(
    left: StepEvidence, right: StepEvidence, left_layout: CertifiedLayout, right_layout: CertifiedLayout
) -> str:
    """Return the first difference between two runs, or two ranks of one, in a step, and what made it; empty if none."""
    found = [
        (left.first_difference(right), left_layout, right_layout),
        (left.disagreement, left_layout, left_layout),
        (right.disagreement, right_layout, right_layout),
    ]
    known = [(difference.place, i) for i, (difference, _, _) in enumerate(found) if difference is not None]
    if not known:
        return ""
    difference, one, other = found[min(known)[1]]
    assert difference is not None
    return _describe(difference, one, other)


def _evidence(
    ranks: Ranks, step: int, layout: CertifiedLayout, advance: Callable[[str], Any]
) -> tuple[StepEvidence, float]:
    answers = ranks.call("step", step)
    advance(str(layout))
    return StepEvidence([observations for observations, _ in answers]), answers[0][1]


def _show_groups(step: int, loss: float, left: StepEvidence, right: StepEvidence) -> None:
    print(f"step {step + 1}, loss {loss!r}")
    for (group, mine), theirs in zip(left.groups().items(), right.groups().values(), strict=True):
        print(f"  {group:<10}{mine}" if mine == theirs else f"  {group:<10}{mine} != {theirs}")


def _describe(difference: Difference, left: CertifiedLayout, right: CertifiedLayout) -> str:
    made = [
        f"{layout}: {seen.action} on rank {seen.rank}" if seen else f"{layout}: nowhere"
        for layout, seen in ((left, difference.left), (right, difference.right))
    ]
    return f"{difference.place}; made by {'; '.join(made)}"


def _compare_fast(options: CertifyOptions, gradients: str) -> int:
    one = CertifiedLayout()
    runs = {
        "fast": (options.layout, config_of(options, options.layout, reduction="fast")),
        "exact": (one, config_of(options, one)),
        "float64": (one, config_of(options, one, dtype="float64")),
    }
    _say(options, runs["fast"][1], f"{options.layout} in fast mode against exact mode")
    still = replace(base_of(options).optim, lr=_NO_LEARNING, warmup_steps=0)
    distances = Distances(options.dtype)
    with contextlib.ExitStack() as stack:
        advance = stack.enter_context(_progress(len(runs) * options.steps))
        ranks = {
            name: stack.enter_context(Ranks(layout.num_ranks, gradients, replace(config, optim=still), options.dtype))
            for name, (layout, config) in runs.items()
        }
        for step in range(options.steps):
            try:
                distances.add(*(_tensors(ranks[name], step, name, advance) for name in runs))
            except ReplicasDiffer as error:
                print(f"not certified: step {step + 1}: ranks that hold the same part of {error} hold other bits of it")
                return 1
    found = distances.of_tensors()
    # If the output is not a terminal, the table may be as wide as it needs to be.
    SafeConsole(width=None if sys.stdout.isatty() else _TABLE_WIDTH).print(_table(found, options.dtype))
    worst = max(found, key=lambda distance: distance.share)
    beyond = sum(not distance.holds for distance in found)
    if beyond:
        print(
            f"not certified: {beyond} of {len(found)} tensors are beyond their bounds, the farthest {worst.name}: "
            f"{worst.of_fast:.3g} roundings, bound {worst.bound:.3g}"
        )
        return 1
    print(f"certified: fast mode is within its bounds, at most at {worst.share:.0%} of one ({worst.name})")
    return 0


def _tensors(ranks: Ranks, step: int, name: str, advance: Callable[[str], Any]) -> Tensors:
    answers = ranks.call("step", step)
    advance(name)
    return assembled(part for parts in answers for part in parts)


def _table(distances: list[Distance], dtype: str) -> Table:
    shown = Table(
        caption=f"in roundings of {dtype}; bound: {FACTOR:g} times exact mode's own distance to float64;\n"
        "noticed from: the relative error that surely breaks the bound",
        box=None,
        pad_edge=False,
    )
    for column in ("gradient of", "fast to exact", "bound", "exact to float64", "noticed from"):
        shown.add_column(column, justify="left" if column == "gradient of" else "right", no_wrap=True)
    for distance in distances:
        mark = "" if distance.holds else "  BEYOND"
        numbers = (distance.of_fast, distance.bound, distance.of_exact)
        shown.add_row(distance.name + mark, *(f"{number:.3g}" for number in numbers), f"{distance.noticed_from:.1e}")
    return shown


def _say(options: CertifyOptions, config: Config, what: str) -> None:
    model, train = config.model, config.train
    print(what)
    print(
        f"{_name_of(options)}: {model.num_layers} layers, hidden {model.hidden_size}, {model.num_heads} heads, "
        f"{train.dtype}, {config.parallel.schedule}, seed {train.seed}, steps {options.steps} of "
        f"{train.num_micro_batches * (config.parallel.dp or 1)} micro-batches",
        flush=True,
    )
    sys.stdout.flush()
