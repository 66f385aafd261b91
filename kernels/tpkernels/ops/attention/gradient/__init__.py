"""Gradients of attention: backward.py launches kernel.py, whose adds turns.py orders, or also query_gradient.py."""
