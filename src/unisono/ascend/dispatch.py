"""Every torch operator on npu tensors: run by torch's CPU kernel on the same bytes.

torch asks here (dispatch key PrivateUse1) whenever an operator meets an npu tensor. A call goes down in four steps:
npu tensors become CPU tensors of the same bytes, the device argument becomes the CPU, the CPU kernel runs, results
become npu tensors. What autograd, autocast and views need happens above, in torch's own C++ code, as on any device; so
results, gradients and errors are those of the CPU. An operator's plan, which says what it returns, is made once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from . import cells, missing, state
from .memory import as_cpu, as_npu, storage_as_cpu

Tensor = torch.Tensor
_CPU = torch.device("cpu")
_aten = torch.ops.aten
_FRESH = -1  # a result in new memory; otherwise the position of the argument that is returned or viewed

# Operators that may mix devices, as on every accelerator: an index or a scale may come from the host.
_MAY_MIX = frozenset(
    {
        "aten::index.Tensor",
        "aten::index.Tensor_out",
        "aten::_unsafe_index.Tensor",
        "aten::index_put",
        "aten::index_put_",
        "aten::_index_put_impl_",
        "aten::_unsafe_index_put",
        "aten::_foreach_copy",
        "aten::_foreach_copy_",
    }
)


class _Plan:
    """What has to be known of an operator to run it, from its schema."""

    __slots__ = ("generator", "may_mix", "op", "results", "writes")

    def __init__(self, op: OpOverload) -> None:
        schema = op._schema
        self.op = op
        self.may_mix = f"{schema.name}.{schema.overload_name}".rstrip(".") in _MAY_MIX
        places: dict[str, int] = {}
        self.writes: list[tuple[int, str]] = []
        self.generator: tuple[int, str] | None = None
        for place, argument in enumerate(schema.arguments):
            alias = argument.alias_info
            if alias is not None:
                for name in alias.before_set:
                    places.setdefault(name, place)
                if alias.is_write:
                    self.writes.append((place, argument.name))
            if argument.name == "generator":
                self.generator = place, argument.name
        #: for each result: which argument it is (True) or views (False), or fresh
        self.results: list[tuple[int, bool]] = []
        for result in schema.returns:
            alias = result.alias_info
            names = [] if alias is None else [name for name in alias.before_set if name in places]
            is_argument = alias is not None and alias.is_write
            self.results.append((places[names[0]] if names else _FRESH, is_argument))


_plans: dict[OpOverload, _Plan] = {}


class _Call:
    """The arguments of one call, made CPU ones."""

    __slots__ = ("host", "index", "pairs", "plan")

    def __init__(self, plan: _Plan) -> None:
        self.plan = plan
        self.index = -1  # of the device
        self.host = False  # an argument with dimensions is on the CPU
        self.pairs: list[tuple[Tensor, Tensor]] = []  # npu and CPU tensor of every npu argument

    def lower(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            if value.is_cpu:
                if value.dim():
                    self.host = True
                return value
            if value.is_meta:
                return value
            self._meet(value.device.index)
            if value.layout is not torch.strided:
                missing.refuse(f"the operator {self.plan.op.name()} on {value.layout} npu tensors")
            cpu = as_cpu(value)
            self.pairs.append((value, cpu))
            return cpu
        if isinstance(value, (list, tuple)):
            return type(value)(self.lower(part) for part in value) if _holds_tensors(value) else value
        if isinstance(value, torch.device) and value.type == "npu":
            if self.index < 0:
                self.index = state.current_device() if value.index is None else value.index
            return _CPU
        return value

    def _meet(self, index: int) -> None:
        if self.index < 0:
            self.index = index
        elif self.index != index and not self.plan.may_mix:
            raise RuntimeError(_two_devices(self.plan, f"npu:{self.index}", f"npu:{index}"))


def run(op: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Runs an operator that was called with npu tensors or for the npu device."""
    plan = _plans.get(op)
    if plan is None:
        plan = _plans[op] = _Plan(op)
    call = _Call(plan)
    lower = call.lower
    cpu_args = [lower(value) for value in args]
    cpu_kwargs = {name: lower(value) for name, value in kwargs.items()} if kwargs else {}
    if call.index < 0:
        missing.refuse(f"the operator {op.name()} on npu")
    if call.host and call.pairs and not plan.may_mix:
        raise RuntimeError(_two_devices(plan, f"npu:{call.index}", "cpu"))
    if plan.generator is not None:
        place, name = plan.generator
        if place >= len(args) and cpu_kwargs.get(name) is None:
            cpu_kwargs[name] = state.generator(call.index)
    resized = [_emptied(plan, cpu_args, cpu_kwargs, pair) for pair in call.pairs] if plan.writes else []
    result = op(*cpu_args, **cpu_kwargs)
    for npu, cpu in filter(None, resized):
        npu.data = as_npu(cpu, call.index)
    if not plan.results:
        return None
    if len(plan.results) == 1:
        return _raise_up(plan, 0, result, args, kwargs, call)
    return tuple(_raise_up(plan, i, part, args, kwargs, call) for i, part in enumerate(result))


def _raise_up(plan: _Plan, i: int, result: Any, args: Sequence[Any], kwargs: dict[str, Any], call: _Call) -> Any:
    place, is_argument = plan.results[i]
    if place == _FRESH:
        return _to_npu(plan, result, call.index)
    argument = args[place] if place < len(args) else kwargs[plan.op._schema.arguments[place].name]
    if is_argument:
        return argument
    if isinstance(result, Tensor):
        return view_of(argument, result)
    return [view_of(argument, part) for part in result]


def _to_npu(plan: _Plan, value: Any, index: int) -> Any:
    if isinstance(value, Tensor):
        if value.layout is not torch.strided or value.is_quantized:
            kind = "quantized" if value.is_quantized else str(value.layout)
            missing.refuse(f"the operator {plan.op.name()} on npu, which gives {kind} tensors,")
        return as_npu(value, index) if value.is_cpu else value
    if isinstance(value, (list, tuple)) and _holds_tensors(value):
        return [_to_npu(plan, part, index) for part in value]
    return value


def view_of(base: Tensor, cpu_view: Tensor) -> Tensor:
    """The view of an npu tensor that has the sizes and strides of a view of its CPU twin; in the same storage."""
    if cpu_view.dtype != base.dtype:
        return as_npu(cpu_view, base.device.index)
    offset = base.storage_offset() + cpu_view.storage_offset()
    return _strided(base, cpu_view.size(), cpu_view.stride(), offset)


def _strided(base: Tensor, size: Sequence[int], stride: Sequence[int], offset: Any) -> Tensor:
    # Both are torch's own C++ code for any device: a second tensor on the storage, then its sizes set.
    view: Tensor = _aten.alias.default(base)
    return _aten.as_strided_.default(view, size, stride, offset)  # type: ignore[no-any-return]


def _emptied(
    plan: _Plan, args: list[Any], kwargs: dict[str, Any], pair: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor] | None:
    """For an output without elements: puts one in its place that can grow, and returns what belongs together."""
    npu, cpu = pair
    if npu.numel():
        return None
    for place, name in plan.writes:
        if place < len(args) and args[place] is cpu:
            args[place] = torch.empty_like(cpu)
            return npu, args[place]
        if kwargs.get(name) is cpu:
            kwargs[name] = torch.empty_like(cpu)
            return npu, kwargs[name]
    return None


def _holds_tensors(values: Sequence[Any]) -> bool:
    return any(isinstance(value, (Tensor, list, tuple)) for value in values)


def _two_devices(plan: _Plan, one: str, other: str) -> str:
    name = plan.op.name()
    return (
        f"Expected all tensors to be on the same device, but found at least two devices, {one} and {other}! "
        f"(when checking arguments of {name})"
    )


# -- operators that are about memory itself


def _as_strided(self: Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None = None) -> Tensor:
    return _strided(self, size, stride, self.storage_offset() if offset is None else offset)


def _copy(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    return _copy_from(source, target)


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    cpu_target = target if target.is_cpu else as_cpu(target)
    cpu_target.copy_(source if source.is_cpu else as_cpu(source))
    return target


def _copy_from_and_resize(source: Tensor, target: Tensor) -> Tensor:
    target.resize_(source.shape)
    return _copy_from(source, target)


def _resize(self: Tensor, size: Sequence[int], *, memory_format: torch.memory_format | None = None) -> Tensor:
    cpu = as_cpu(self).clone().resize_(size, memory_format=memory_format)
    if self.storage_offset() * self.itemsize + cpu.untyped_storage().nbytes() <= self.untyped_storage().nbytes():
        _aten.as_strided_.default(self, cpu.size(), cpu.stride(), self.storage_offset())
    else:
        self.data = as_npu(cpu, self.device.index)
    return self


def _set_storage(
    self: Tensor, source: torch.UntypedStorage, offset: int = 0, size: Any = None, stride: Any = ()
) -> Tensor:
    cpu = storage_as_cpu(source)
    values = torch.empty(0, dtype=self.dtype)
    if size is None:
        values.set_(cpu.untyped_storage())
    else:
        values.set_(cpu.untyped_storage(), offset, size, stride)
    self.data = as_npu(values, source.device.index)
    return self


def _set_tensor(self: Tensor, source: Tensor) -> Tensor:
    self.data = _aten.alias.default(source)
    return self


def _record_stream(self: Tensor, stream: Any) -> None:
    # Every operator has run when its call returns, so no stream can still need the memory.
    return None


_SPECIAL: dict[str, Callable[..., Any]] = {
    "aten::as_strided": _as_strided,
    "aten::copy_": _copy,  # torch's own would ask _copy_from, for conjugated tensors for ever
    "aten::_copy_from": _copy_from,
    "aten::_copy_from_and_resize": _copy_from_and_resize,
    "aten::resize_": _resize,
    "aten::set_.source_Storage": _set_storage,
    "aten::set_.source_Storage_storage_offset": _set_storage,
    "aten::set_.source_Tensor": _set_tensor,
    "aten::record_stream": _record_stream,
    "aten::_thnn_fused_lstm_cell": cells.lstm_cell,
    "aten::_thnn_fused_lstm_cell_backward_impl": cells.lstm_cell_backward,
    "aten::_thnn_fused_gru_cell": cells.gru_cell,
    "aten::_thnn_fused_gru_cell_backward": cells.gru_cell_backward,
}

# Composed by torch of kernels that it picks by the device, and knows none for npu: these run whole as well.
_WHOLE = frozenset({"aten::convolution", "aten::convolution_backward"})

_registered: list[torch.library.Library] = []  # alive, the kernels stay


def register() -> None:
    """Puts these kernels into torch's dispatcher, once per process.

    Each operator that has a kernel for the CPU gets one here, so that it runs whole; what torch composes of others is
    left to torch, and the fall-back takes the rest.
    """
    if _registered:
        return
    everything = torch.library.Library("_", "IMPL")
    everything.fallback(_run_other, "PrivateUse1")
    aten = torch.library.Library("aten", "IMPL")
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    for name in torch._C._dispatch_get_all_op_names():
        if name in _SPECIAL:
            kernel = _SPECIAL[name]
        elif name in _WHOLE or (name.startswith("aten::") and has_kernel(name, "CPU")):
            kernel = _kernel(name)
        else:
            continue
        aten.m.impl(name.removeprefix("aten::"), "PrivateUse1", kernel, False)  # type: ignore[union-attr]
    _registered.extend((everything, aten))


def _run_other(op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    try:
        return run(op, args, kwargs)
    except NotImplementedError as error:
        if "arguments from the 'CPU' backend" in str(error):  # torch's words, of a screen's length
            missing.refuse(f"the operator {op.name()} on npu, which has no kernel for the CPU,")
        raise


def _kernel(name: str) -> Callable[..., Any]:
    """The kernel of one operator; the operator itself is looked up when it is first needed."""
    op: OpOverload | None = None

    def kernel(*args: Any, **kwargs: Any) -> Any:
        nonlocal op
        if op is None:
            packet, _, overload = name.removeprefix("aten::").partition(".")
            op = getattr(getattr(_aten, packet), overload or "default")
        return run(op, args, kwargs)

    return kernel
