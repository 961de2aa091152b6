"""Operations with a TPU kernel, each with a reference implementation and a gradient rule."""
