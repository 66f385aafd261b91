"""RMSNorm and LayerNorm, alone or after adding the residual."""
