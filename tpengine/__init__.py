"""tpengine: tensor x pipeline x data parallel transformer training, driven by one verified plan.

Importing the package loads nothing: take what you need from its modules (`tpengine.layers`, `tpengine.plan`,
`tpengine.training.trainer`, ...). README.md beside this file says which to read first.
"""
