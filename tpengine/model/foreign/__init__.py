"""Tensor parallelism for a model that somebody else wrote: its own forward, its own names, our rules.

parallelize.py   `parallelize` cuts a module in place; `whole_state_dict` gives its weights back in one piece
rules.py         which rule each module has, and everything that is refused before a weight is touched
cut.py           the part of a tensor that a rank holds, and a tensor out of its parts
layers.py        what takes the place of nn.Linear, Conv1D, nn.Embedding and nn.PReLU; activations are whole tokens
alike.py         what sees whole activations must have the same gradient on every rank

Layers for a model of your own, which cut activations over the tokens too, are in tpengine.layers.
"""

from tpengine.model.foreign.parallelize import parallelize as parallelize
from tpengine.model.foreign.parallelize import whole_state_dict as whole_state_dict
