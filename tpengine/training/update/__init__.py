"""The update of a step, after its gradients are summed; see README.md."""
