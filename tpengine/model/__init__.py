"""The transformer and the layers it is built of."""
