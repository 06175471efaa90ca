"""How StepTimer learns of a model's forward, of the first gradient, and of a wrong model: hooks and their checks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from typing import Any, ClassVar

from mlsyslab.contract import ConfigError


class WrappedForward:
    """The model's forward with a call before and after it, until `remove`.

    In place of forward hooks, whose mere presence sends every call down the module's slow path: 16 of the 90
    microseconds that the timer cost in all (docs/log.md).
    """

    def __init__(self, model: Any, before: Callable[[], None], after: Callable[[Any], None]) -> None:
        self._model, self._own = model, vars(model).get("forward")
        inner = model.forward

        @wraps(inner)
        def forward(*args: Any, **kwargs: Any) -> Any:
            before()
            output = inner(*args, **kwargs)
            after(output)
            return output

        self._forward = model.forward = forward

    def remove(self) -> None:
        """Put the model's own forward back, unless somebody has wrapped it again since."""
        model, self._model = self._model, None
        if model is not None and vars(model).get("forward") is self._forward:
            del model.forward
            if self._own is not None:
                model.forward = self._own


class WatchedBackward:
    """torch.autograd.backward, which Tensor.backward calls, with a call before and after it, until `remove`.

    Several watchers share one wrapper; the last to leave puts torch's own back, unless somebody has wrapped
    it again since. A hook on a tensor, by which the same can be learnt, costs 17 microseconds a step and an
    engine callback 7; this costs 1 (docs/log.md).
    """

    _watchers: ClassVar[tuple[tuple[Callable[[], None], Callable[[], None]], ...]] = ()
    _wrapper: ClassVar[Any] = None
    _inner: ClassVar[Any] = None

    def __init__(self, before: Callable[[], None], after: Callable[[], None]) -> None:
        import torch

        cls, self._watcher = WatchedBackward, (before, after)
        if not cls._watchers and torch.autograd.backward is not cls._wrapper:
            cls._inner, cls._wrapper = torch.autograd.backward, cls._wrap(torch.autograd.backward)
            torch.autograd.backward = cls._wrapper
        cls._watchers = (*cls._watchers, self._watcher)

    @classmethod
    def _wrap(cls, inner: Callable[..., None]) -> Callable[..., None]:
        @wraps(inner)
        def backward(*args: Any, **kwargs: Any) -> None:
            watchers = (
                cls._watchers
            )  # replaced, never changed: who came or went during this call does not count
            for before, _ in watchers:
                before()
            try:
                inner(*args, **kwargs)
            finally:
                for _, after in watchers:
                    after()

        return backward

    def remove(self) -> None:
        """Stop watching; a second call does nothing."""
        import torch

        cls = WatchedBackward
        cls._watchers = tuple(watcher for watcher in cls._watchers if watcher is not self._watcher)
        if not cls._watchers and torch.autograd.backward is cls._wrapper:
            torch.autograd.backward = cls._inner


def check_wiring(model: Any, optimizer: Any, warmup: int) -> None:
    """Raise ConfigError for what cannot be hooked."""
    if not hasattr(model, "register_forward_pre_hook"):
        raise ConfigError(
            f"model={type(model).__name__} cannot be hooked; give the torch.nn.Module of your loop"
        )
    if optimizer is not None and not hasattr(optimizer, "register_step_pre_hook"):
        raise ConfigError(
            f"optimizer={type(optimizer).__name__} has no step hooks; give a torch.optim.Optimizer, or None "
            'and put its step into `with timer.phase("optimizer"):`'
        )
    if warmup < 0:
        raise ConfigError(f"warmup={warmup} is below 0; give the number of first steps to mark")


def check_fired(steps: int, forwards: bool, backwards: bool) -> None:
    """Raise ConfigError when `steps` were timed and the model's forward, or its backward, never ran in one."""
    if not forwards:
        raise ConfigError(
            f"{steps} steps were timed and the model's forward never ran in one; "
            "give StepTimer the module that your loop calls (the DDP wrapper, not the module inside it)"
        )
    if not backwards:
        raise ConfigError(
            f"{steps} steps were timed and no gradient reached the model's output; "
            "give StepTimer the module whose output your loss uses, or run the loop under torch.no_grad()"
        )


def hook_gradient(tensor: Any, hook: Callable[[Any], None]) -> None:
    """`tensor.register_hook(hook)` without the handle, which nobody keeps and which is half of its cost."""
    node = tensor.grad_fn
    if node is None or tensor._backward_hooks is not None or not hasattr(node, "_register_hook_dict"):
        tensor.register_hook(hook)
    else:  # what register_hook itself does (torch/_tensor.py); handles count from 0
        tensor._backward_hooks = OrderedDict([(-1, hook)])
        node._register_hook_dict(tensor)


def differentiable(output: Any) -> Iterator[Any]:
    """The tensors of a module's output that a gradient can reach, through tuples, lists, dicts and dataclasses."""
    if getattr(output, "requires_grad", False):
        yield output
    elif isinstance(output, (tuple, list)):
        for item in output:
            yield from differentiable(item)
    elif isinstance(output, Mapping):
        yield from differentiable(list(output.values()))
    elif hasattr(output, "__dataclass_fields__"):
        yield from differentiable([getattr(output, name) for name in output.__dataclass_fields__])
