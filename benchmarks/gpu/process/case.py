"""The process of one case: `python -m benchmarks.gpu.process.case REQUEST`, started by runner.py.

REQUEST is JSON: function, arguments, file of rows, seconds after which to print where it hangs. The exit code is 0; 1
if a result is wrong; 3 if the case raised.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import signal
import sys
import threading
import traceback
from pathlib import Path

PASSED, WRONG, RAISED = 0, 1, 3


def main(request: str) -> int:
    """Run the case that the request names; return the exit code."""
    asked = json.loads(request)
    faulthandler.enable()
    faulthandler.dump_traceback_later(asked["hang_seconds"])
    threading.Thread(target=_end_with_parent, daemon=True).start()
    module, _, name = asked["function"].partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
        return int(function(Path(asked["rows"]), **asked["arguments"]) or PASSED)
    except AssertionError:
        traceback.print_exc()
        return WRONG
    except Exception:
        traceback.print_exc()
        return RAISED


def _end_with_parent() -> None:
    """End this process and all it has started when the other end of stdin closes: whoever waits for it is gone."""
    while os.read(0, 1):
        pass
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    code = main(sys.argv[1])
    sys.stdout.flush()
    sys.stderr.flush()
    # What a broken device does to a normal exit must not change the code.
    os._exit(code)
