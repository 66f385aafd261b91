"""`python -m benchmarks.run gpu`: everything that is worth knowing about one GPU, in the minutes that there are."""

import importlib.util
import sys

from benchmarks.harness.revision import ROOT

# It runs where nothing of this project is installed, and tpengine imports tpkernels.
if importlib.util.find_spec("tpkernels") is None:
    sys.path.append(str(ROOT / "kernels"))
