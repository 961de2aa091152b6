"""Operations that a TPU needs a kernel for: each with its reference and its rule for gradients."""
