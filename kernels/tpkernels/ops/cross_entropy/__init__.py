"""Cross-entropy of whole logits, of sharded logits, and of logits that are never all in memory."""
