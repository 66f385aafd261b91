"""Published training runs, predicted: `tpengine plan --table`. No torch.

row.py (a row's text and notes), sizes.py (its numbers), machines.py (its machine), engines.py (its engine as options of
the cost model), lowering.py (its verified plan), zb_2p.py (a schedule that only others have), predict.py (its step,
memory and MFU), table.py (the files).

What a row says of its measured outcome is not read. No constant here or in the machines is fitted to published steps.
"""

from tpengine.advice.published.predict import Prediction, predicted
from tpengine.advice.published.row import Row
from tpengine.advice.published.table import predict_table

__all__ = ["Prediction", "Row", "predict_table", "predicted"]
