"""What an architecture's file is written with."""

from tpengine.architectures.attention import Attention as Attention
from tpengine.architectures.config_json import ConfigJson as ConfigJson
from tpengine.architectures.config_json import llama_sizes as llama_sizes
from tpengine.architectures.description import Architecture as Architecture
from tpengine.architectures.description import pre_norm as pre_norm
from tpengine.architectures.description import reordered_norm as reordered_norm
from tpengine.architectures.description import sandwich_norm as sandwich_norm
from tpengine.architectures.ends import Ends as Ends
from tpengine.architectures.experts import Experts as Experts
from tpengine.architectures.feed_forward import FeedForward as FeedForward
from tpengine.architectures.norm import Norm as Norm
from tpengine.architectures.part import Part as Part
from tpengine.architectures.table import column as column
from tpengine.architectures.table import heads as heads
from tpengine.architectures.table import replicate as replicate
from tpengine.architectures.table import row as row
from tpengine.architectures.table import vocab as vocab
