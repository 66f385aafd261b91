"""Gradients of attention: backward.py launches query_gradient.py and key_gradient.py, which compute scores again."""
