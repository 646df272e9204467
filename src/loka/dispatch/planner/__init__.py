"""Profile and requirement in, plan out: a pure function, a decision a file."""
