"""Records the products of one forward: which module asked for them, on what, with which Parameter."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode

from loka.sites.hooks import PassingHook, is_traced
from loka.sites.products import COPIES, Product, products_of

__all__ = ["Recorded", "Recorder", "tensor_key"]


@dataclass(frozen=True, slots=True)
class Recorded:
    """One product as it ran.

    Attributes:
        module: Qualified name of the module whose forward asked for it; empty for the model itself.
        op: Name of the operation.
        parameter: Qualified name of the Parameter operand; empty where both are activations.
        own_weight: The Parameter is the asking module's `weight` and the call is F.linear.
        rows: Batch times M.
        n: Output features.
        k: The contracted length.
        bias: Whether a bias is added.
        input_key: Equal for calls that were given the same input tensor.
        reason: Why the shape could not be worked out.
    """

    module: str
    op: str
    parameter: str
    own_weight: bool
    rows: int
    n: int
    k: int
    bias: bool
    input_key: tuple[Any, ...]
    reason: str


def tensor_key(x: Tensor) -> tuple[Any, ...]:
    """Equal for tensors that are the same numbers in the same place: a view keeps it, a write does not."""
    if not _has_storage(x):
        return (id(x),)
    version = 0 if x.is_inference() else x._version
    width = x.shape[-1] if x.dim() else 1
    layout = () if x.is_contiguous() else x.stride()
    return (x.untyped_storage().data_ptr(), x.storage_offset(), x.numel(), width, layout, version, x.dtype)


class Recorder(TorchFunctionMode):
    """Collects the products of every torch call made while it is active.

    Args:
        model: Its modules' forwards and its Parameters give the names.
        names: Module to qualified name.
        when: Asked at every call whether it counts. What does not count is not kept alive either.
    """

    def __init__(
        self, model: nn.Module, names: dict[nn.Module, str], *, when: Callable[[], bool] = lambda: True
    ) -> None:
        super().__init__()
        self._when = when
        self.found: list[Recorded] = []
        self._names = names
        self._stack: list[nn.Module] = []
        self._model = model
        self._by_identity: dict[int, str] = {}
        self._by_storage: dict[int, str] = {}
        self._name_parameters()
        # An address names a tensor only while the tensor lives.
        self._kept: list[Tensor] = []
        self._below: TorchFunctionMode | None = None
        self._is_over = False

    def __enter__(self) -> Recorder:
        modes = _get_current_function_mode_stack()
        self._below = modes[-1] if modes else None
        _push_mode(self)
        return self

    def __exit__(self, *exc: object) -> None:
        """Take this mode off the stack, wherever it lies by now.

        A loop has modes of its own (`with torch.device("cuda"):`), which may begin before a watched step and
        end within it, or the other way round. One that ended within it took ours for its own off the top.
        """
        self._is_over = True  # on the stack of another thread, which is not to be reached, it stays and rests
        self._kept.clear()
        modes = _get_current_function_mode_stack()
        place = next((i for i, mode in enumerate(modes) if mode is self), None)
        if place is None:
            place = next((i for i, mode in enumerate(modes) if mode is self._below), None)
        self._below = None
        if place is None:
            return
        for _ in modes[place:]:
            _pop_mode()
        for mode in modes[place + 1 :]:
            _push_mode(mode)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Note what is asked for, then let it run."""
        kwargs = kwargs or {}
        if self._is_over or not self._when() or is_traced():
            return func(*args, **kwargs)
        for product in products_of(func, args, kwargs):
            self._note(product)
        out = func(*args, **kwargs)
        if func in COPIES and args and isinstance(args[0], Tensor) and isinstance(out, Tensor):
            name = self._parameter_of(args[0])
            if name and _has_storage(out):
                self._by_storage[_storage(out)] = name
                self._kept.append(out)
        return out

    @contextlib.contextmanager
    def following_modules(self) -> Iterator[None]:
        """While active, knows whose forward is running. What a forward that raised found is dropped."""
        first, handled = 0, sys.exc_info()[1]  # when the outermost forward began

        def enter(module: nn.Module, args: Any) -> None:
            nonlocal first, handled
            if not self._stack:
                first, handled = len(self.found), sys.exc_info()[1]
            self._stack.append(module)

        def leave(module: nn.Module, args: Any, out: Any) -> None:
            # A forward that raised may have left modules above this one.
            while self._stack and self._stack.pop() is not module:
                pass
            raised = sys.exc_info()[1]
            if not self._stack and out is None and raised is not None and raised is not handled:
                del self.found[first:]

        handles = [
            handle
            for module in self._names
            for handle in (
                module.register_forward_pre_hook(PassingHook(enter), prepend=True),
                module.register_forward_hook(PassingHook(leave), always_call=True),
            )
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _note(self, product: Product) -> None:
        parameter, x, rows, n = self._parameter_of(product.b), product.a, product.m, product.n
        if not parameter and (parameter := self._parameter_of(product.a)):
            x, rows, n = product.b, product.n, product.m
        if not parameter and not self._stack:
            return  # an optimizer or a loss outside the model multiplies too
        asking = next((m for m in reversed(self._stack) if m in self._names), None)
        own = isinstance(asking, nn.Linear) and product.op == "linear" and product.b is asking.weight
        self._kept.append(x)
        self.found.append(
            Recorded(
                module=self._names[asking] if asking is not None else "",
                op=product.op,
                parameter=parameter,
                own_weight=own,
                rows=product.batch * rows,
                n=n,
                k=product.k,
                bias=product.bias,
                input_key=tensor_key(x) if product.input_seen and x.numel() else (len(self.found),),
                reason=product.reason,
            )
        )

    def _name_parameters(self) -> None:
        for name, parameter in self._model.named_parameters():
            name = name.replace("_orig_mod.", "")
            self._by_identity.setdefault(id(parameter), name)
            if _has_storage(parameter):
                self._by_storage.setdefault(_storage(parameter), name)

    def _parameter_of(self, t: Tensor) -> str:
        """Name of the Parameter that `t` is, views or copies; empty for an activation."""
        if isinstance(t, nn.Parameter):
            if id(t) not in self._by_identity:
                self._name_parameters()  # a lazy module has just made it
            return self._by_identity.get(id(t), "")
        return self._by_storage.get(_storage(t), "") if _has_storage(t) else ""


def _has_storage(t: Tensor) -> bool:
    plain = type(t) in (Tensor, nn.Parameter) and t.layout is torch.strided and t.numel() > 0
    return plain and not torch._C._functorch.is_functorch_wrapped_tensor(t)


def _storage(t: Tensor) -> int:
    return t.untyped_storage().data_ptr()
