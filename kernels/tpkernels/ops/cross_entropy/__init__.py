"""Cross-entropy of whole, sharded and never materialised logits."""
