"""What an architecture's file is written with."""

from tpengine.architectures.describe.config_json import ConfigJson as ConfigJson
from tpengine.architectures.describe.description import Architecture as Architecture
from tpengine.architectures.describe.orders import pre_norm as pre_norm
from tpengine.architectures.describe.orders import sandwich_norm as sandwich_norm
from tpengine.architectures.describe.parts import Attention as Attention
from tpengine.architectures.describe.parts import Ends as Ends
from tpengine.architectures.describe.parts import FeedForward as FeedForward
from tpengine.architectures.describe.parts import Norm as Norm
from tpengine.architectures.describe.parts import Part as Part
from tpengine.architectures.describe.sizes import llama_sizes as llama_sizes
from tpengine.architectures.describe.table import column as column
from tpengine.architectures.describe.table import heads as heads
from tpengine.architectures.describe.table import replicate as replicate
from tpengine.architectures.describe.table import row as row
from tpengine.architectures.describe.table import vocab as vocab
