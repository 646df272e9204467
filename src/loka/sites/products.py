"""Which products a torch call computes, from its arguments alone.

Shapes: a product is [rows, K] @ [K, N] once its batch is folded into the rows (rows = batch * M). Where the
Parameter stands on the left (W_NK @ x_BK1), N counts the Parameter's rows.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

__all__ = ["COPIES", "Product", "products_of"]


class Product(NamedTuple):
    """One product a @ b as a call states it.

    Attributes:
        op: Name of the operation, such as `bmm`.
        a: Left operand.
        b: Right operand.
        batch: Independent products in the call.
        m: Rows of `a` in one of them.
        n: Columns of `b`.
        k: The contracted length.
        bias: Whether a vector is added to every row.
        reason: Why the shape could not be worked out; empty where it was.
        input_seen: `a` (or `b`) is the very input; False where it arises inside the call.
    """

    op: str
    a: Tensor
    b: Tensor
    batch: int
    m: int
    n: int
    k: int
    bias: bool = False
    reason: str = ""
    input_seen: bool = True


def products_of(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> list[Product]:
    """The products that `func(*args, **kwargs)` computes; none for any other function."""
    reader = _READERS.get(func)
    if reader is None:
        return []
    tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)]
    if len(tensors) > 1 and any(t.is_nested for t in tensors):  # its sizes are no numbers
        name = func.__name__.removeprefix("linalg_")
        return [Product(name, tensors[0], tensors[1], 0, 0, 0, 0, reason="an operand is nested")]
    return reader(func, args, kwargs)


def _pick(args: Sequence[Any], kwargs: dict[str, Any], position: int, *names: str) -> Any:
    if position < len(args):
        return args[position]
    return next((kwargs[name] for name in names if name in kwargs), None)


def _linear(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> list[Product]:
    x, w = _pick(args, kwargs, 0, "input"), _pick(args, kwargs, 1, "weight")
    bias = _pick(args, kwargs, 2, "bias") is not None
    n = w.shape[0] if w.dim() == 2 else 1
    return [Product("linear", x, w, 1, math.prod(x.shape[:-1]), n, x.shape[-1], bias)]


def _matmul_of(op: str, a: Tensor, b: Tensor, *, bias: bool = False) -> Product:
    m = a.shape[-2] if a.dim() > 1 else 1
    n = b.shape[-1] if b.dim() > 1 else 1
    batch = math.prod(torch.broadcast_shapes(a.shape[:-2], b.shape[:-2]))
    return Product(op, a, b, batch, m, n, a.shape[-1], bias)


def _matmul(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> list[Product]:
    a = _pick(args, kwargs, 0, "input", "self")
    b = _pick(args, kwargs, 1, "other", "mat2", "vec", "tensor")
    return [_matmul_of(func.__name__.removeprefix("linalg_"), a, b)]


def _matmul_plus(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> list[Product]:
    added = _pick(args, kwargs, 0, "input", "self")
    a = _pick(args, kwargs, 1, "mat1", "batch1", "mat")
    b = _pick(args, kwargs, 2, "mat2", "batch2", "vec")
    bias = isinstance(added, Tensor) and (added.dim() <= 1 or added.shape[-2] == 1)
    return [_matmul_of(func.__name__, a, b, bias=bias)]


def _tensordot(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> list[Product]:
    a, b = _pick(args, kwargs, 0, "a"), _pick(args, kwargs, 1, "b")
    dims = _pick(args, kwargs, 2, "dims")
    dims = 2 if dims is None else dims
    if isinstance(dims, int):
        k = math.prod(a.shape[a.dim() - dims :])
    elif isinstance(dims, Tensor):
        return [Product("tensordot", a, b, 0, 0, 0, 0, reason="its dims are given as a tensor")]
    else:
        k = math.prod(a.shape[d] for d in dims[0])
    return [Product("tensordot", a, b, 1, a.numel() // max(k, 1), b.numel() // max(k, 1), k)]


def _einsum(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> list[Product]:
    equation, operands = args[0], args[1:]
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = operands[0]
    tensors = [t for t in operands if isinstance(t, Tensor)]
    if not isinstance(equation, str):  # einsum(a, [0, 1], b, [1, 2]): the equation is spelled in numbers
        tensors = [t for t in args if isinstance(t, Tensor)]
    if len(tensors) < 2:
        return []
    a, b = tensors[0], tensors[1]
    if not isinstance(equation, str) or len(tensors) > 2:
        why = f"an einsum of {len(tensors)} operands" if len(tensors) > 2 else "an einsum without letters"
        return [Product("einsum", a, other, 0, 0, 0, 0, reason=why) for other in tensors[1:]]
    return [_einsum_of(equation.replace(" ", ""), a, b)]


def _einsum_of(equation: str, a: Tensor, b: Tensor) -> Product:
    left, _, out = equation.partition("->")
    a_sizes, b_sizes = (_label_sizes(labels, t) for labels, t in zip(left.split(","), (a, b), strict=True))
    in_both = a_sizes.keys() & b_sizes.keys()
    kept = set(out) if "->" in equation else (a_sizes.keys() ^ b_sizes.keys())
    # Dimensions behind an ellipsis are numbered from the right; they broadcast and are always kept.
    kept |= {label for label in in_both if label.startswith("-")}
    batch = math.prod(max(a_sizes[c], b_sizes[c]) for c in in_both & kept)
    k = math.prod(a_sizes[c] for c in in_both - kept)
    m = math.prod(size for c, size in a_sizes.items() if c not in in_both)
    n = math.prod(size for c, size in b_sizes.items() if c not in in_both)
    return Product("einsum", a, b, batch, m, n, k)


def _label_sizes(labels: str, t: Tensor) -> dict[str, int]:
    head, dots, tail = labels.partition("...")
    hidden = t.dim() - len(head) - len(tail) if dots else 0
    names = [*head, *(f"-{i}" for i in range(hidden, 0, -1)), *tail]
    return dict(zip(names, t.shape, strict=True))


def _bilinear(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> list[Product]:
    x1, w = _pick(args, kwargs, 0, "input1"), _pick(args, kwargs, 2, "weight")
    bias = _pick(args, kwargs, 3, "bias") is not None
    # x1_MI @ W_I(OJ), then one dot product with x2 for each output: the first is the GEMM.
    rows, n = math.prod(x1.shape[:-1]), w.shape[0] * w.shape[2]
    return [Product("bilinear", x1, w, 1, rows, n, w.shape[1], bias)]


def _attention(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> list[Product]:
    q, k = _pick(args, kwargs, 0, "query"), _pick(args, kwargs, 1, "key")
    v = _pick(args, kwargs, 2, "value")
    batch, length, width = math.prod(q.shape[:-2]), q.shape[-2], q.shape[-1]
    return [
        Product("attention_scores", q, k, batch, length, k.shape[-2], width),
        Product("attention_values", q, v, batch, length, v.shape[-1], v.shape[-2], input_seen=False),
    ]


def _multi_head(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> list[Product]:
    """nn.MultiheadAttention: torch hands the call over as a whole, so its inside is written out here."""
    given = inspect.signature(func).bind(*args, **kwargs).arguments
    q, keys = given["query"], given["key"]
    heads, width = given["num_heads"], given["embed_dim_to_check"]
    q_rows, k_rows = q.numel() // q.shape[-1], keys.numel() // keys.shape[-1]
    batch = q.shape[1] if q.dim() == 3 else 1
    length, kv_length = q_rows // max(batch, 1), k_rows // max(batch, 1)
    bias = given.get("in_proj_bias") is not None
    found = []
    for side in ("query", "key", "value"):
        x = given[side]
        w = given.get(f"{side[0]}_proj_weight")
        w = given["in_proj_weight"] if w is None else w
        rows = q_rows if side == "query" else k_rows
        found.append(Product("linear", x, w, 1, rows, width, x.shape[-1], bias))
    head = width // heads
    scores = (batch * heads, length, kv_length, head)
    values = (batch * heads, length, head, kv_length)
    out_w, out_bias = given["out_proj_weight"], given.get("out_proj_bias") is not None
    return [
        *found,
        Product("attention_scores", q, keys, *scores, input_seen=False),
        Product("attention_values", q, given["value"], *values, input_seen=False),
        Product("linear", q, out_w, 1, q_rows, width, width, out_bias, input_seen=False),
    ]


_Reader = Callable[[Callable[..., Any], Sequence[Any], dict[str, Any]], list[Product]]

_READERS: dict[Any, _Reader] = {
    nn.functional.linear: _linear,
    nn.functional.bilinear: _bilinear,
    nn.functional.scaled_dot_product_attention: _attention,
    nn.functional.multi_head_attention_forward: _multi_head,
    torch.einsum: _einsum,
    torch.tensordot: _tensordot,
    torch.linalg.matmul: _matmul,
    **{
        f: _matmul
        for name in ("matmul", "mm", "bmm", "mv", "__matmul__")
        for f in (getattr(torch, name, None), getattr(Tensor, name))
        if f is not None
    },
    **{
        f: _matmul_plus
        for name in ("addmm", "baddbmm", "addmv")
        for f in (getattr(torch, name), getattr(Tensor, name), getattr(Tensor, name + "_"))
    },
}

# A copy or cast of a Parameter is still the Parameter to us; views are known by their storage.
COPIES = frozenset(
    f
    for name in (
        "to",
        "type",
        "type_as",
        "float",
        "half",
        "bfloat16",
        "double",
        "contiguous",
        "clone",
        "reshape",
        "flatten",
        "detach",
    )
    for f in (getattr(torch, name, None), getattr(Tensor, name, None))
    if callable(f)
)
