"""torch.npu, and the operators of torch_npu and mindspeed that need no group, one function each; see on_npu.py."""

import gc
import warnings

import torch

from .on_npu import expect


def the_module():
    import torch_npu

    assert torch_npu.npu is torch.npu
    assert torch.npu.is_available()
    assert torch.npu.device_count() >= 2
    assert torch.npu.current_device() == 0
    torch.npu.synchronize()
    torch_npu.npu.set_device("npu:0")
    assert "emulated" in torch.npu.get_device_name(0)
    assert torch.npu.get_device_properties(0).total_memory > 1 << 28
    assert torch.accelerator.current_accelerator().type == "npu"
    assert torch.get_device_module("npu") is torch.npu
    assert str(torch.device("npu", 1)) == "npu:1"
    free, total = torch.npu.mem_get_info()
    assert 0 < free <= total
    torch.npu.empty_cache()


def streams_and_events():
    import torch_npu

    stream = torch.npu.Stream()
    assert isinstance(stream, torch.Stream)
    start, end = torch.npu.Event(enable_timing=True), torch.npu.Event(enable_timing=True)
    start.record()
    with torch.npu.stream(stream):
        assert torch.npu.current_stream() == stream
        x = torch.ones(2, device="npu") * 2
    assert torch.npu.current_stream() == torch.npu.default_stream()
    torch.npu.current_stream().wait_stream(stream)
    x.record_stream(torch.npu.current_stream())
    event = stream.record_event()
    torch_npu.npu.current_stream().wait_event(event)
    assert event.query()
    assert stream.query()
    end.record()
    end.synchronize()
    stream.synchronize()
    assert start.elapsed_time(end) > 0
    expect(RuntimeError, "enable_timing=True", event.elapsed_time, end)
    expect(NotImplementedError, "torch.npu.Event(interprocess=True)", torch.npu.Event, interprocess=True)
    assert stream.device == torch.device("npu:0")


def memory_figures():
    gc.collect()
    torch.npu.reset_peak_memory_stats()
    before = torch.npu.memory_allocated()
    x = torch.zeros(1000, device="npu")
    assert torch.npu.memory_allocated() == before + 4000
    y = x[10:]
    z = x + 1
    assert torch.npu.memory_allocated() == before + 8000
    del x, z
    assert torch.npu.memory_allocated() == before + 4000
    del y
    assert torch.npu.memory_allocated() == before
    assert torch.npu.max_memory_allocated() == before + 8000
    assert torch.npu.memory_stats()["allocated_bytes.all.peak"] == before + 8000
    torch.npu.reset_peak_memory_stats()
    assert torch.npu.max_memory_allocated() == before


def missing_names():
    import torch_npu

    for call, name in (
        (lambda: torch_npu.npu_fusion_attention, "torch_npu.npu_fusion_attention"),
        (lambda: torch.npu.NPUGraph, "torch.npu.NPUGraph"),
        (lambda: torch_npu.npu.set_dump, "torch.npu.set_dump"),
        (lambda: torch_npu.distributed.no_such_thing, "torch_npu.distributed.no_such_thing"),
    ):
        expect(NotImplementedError, f"{name} is not emulated by unisono.ascend", call)
        expect(AttributeError, "docs/ascend.md", call)
    assert not hasattr(torch_npu, "npu_fusion_attention")
    assert getattr(torch_npu, "npu_swiglu", None) is None
    expect(ImportError, "torch_npu.contrib is not emulated", __import__, "torch_npu.contrib.transfer_to_npu")
    expect(ImportError, "torch_npu.profiler is not emulated", exec, "from torch_npu import profiler")
    expect(ImportError, "mindspeed.core is not emulated", exec, "from mindspeed.core import x")
    expect(ImportError, "mindspore.nn is not emulated", exec, "import mindspore.nn")
    expect(AttributeError, "mindspore.Tensor is not emulated", exec, "import mindspore; mindspore.Tensor")


def settings_that_change_nothing_say_so():
    for change, name in (
        (lambda: torch.npu.set_compile_mode(jit_compile=False), "torch.npu.set_compile_mode"),
        (lambda: setattr(torch.npu.config, "allow_internal_format", False), "torch.npu.config.allow_internal_format"),
        (lambda: setattr(torch.npu.matmul, "allow_hf32", True), "torch.npu.matmul.allow_hf32"),
        (lambda: torch.npu.set_option({"MM_BMM_ND_ENABLE": "enable"}), "torch.npu.set_option"),
    ):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            change()
        assert name in str(caught[0].message), name
    assert torch.npu.matmul.allow_hf32 is True
    expect(AttributeError, "torch.npu.config.no_such", setattr, torch.npu.config, "no_such", 1)


def _product(x, w, bias=None):
    y = x.double() @ w.double()
    return y if bias is None else y + bias.double()


def grouped_matmul():
    import torch_npu

    torch.manual_seed(3)
    for dtype, bias_dtype in (
        (torch.float32, torch.float32),
        (torch.float16, torch.float16),
        (torch.bfloat16, torch.float32),
    ):
        x = torch.randn(7, 5).to(dtype)
        ws = [torch.randn(5, 4).to(dtype) for _ in range(3)]
        bs = [torch.randn(4).to(bias_dtype) for _ in range(3)]
        rows = [2, 0, 5]
        parts = x.split(rows)
        want = [_product(a, w, b) for a, w, b in zip(parts, ws, bs, strict=True)]
        nx, nws, nbs = x.npu(), [w.npu() for w in ws], [b.npu() for b in bs]

        def close(got, want, dtype=dtype):
            assert len(got) == len(want)
            for a, b in zip(got, want, strict=True):
                assert a.dtype is dtype
                assert a.device.type == "npu"
                torch.testing.assert_close(a.cpu().double(), b, rtol=torch.finfo(dtype).eps, atol=1e-5)

        gmm = torch_npu.npu_grouped_matmul
        totals, counts = torch.tensor([2, 2, 7]).npu(), torch.tensor(rows).npu()
        close(gmm([t.npu() for t in parts], nws, bias=nbs), want)
        close(gmm([t.npu() for t in parts], nws, bias=nbs, split_item=2), [torch.cat(want)])
        close(gmm([nx], nws, bias=nbs, group_list=[2, 2, 7], split_item=1), want)
        close(gmm([nx], nws, bias=nbs, group_list=[2, 2, 7], split_item=3), [torch.cat(want)])
        close(gmm([nx], nws, bias=nbs, group_list=totals, group_type=0, split_item=3), [torch.cat(want)])
        close(
            gmm([nx], nws, bias=nbs, group_list=counts, group_type=0, group_list_type=1, split_item=3),
            [torch.cat(want)],
        )
        stacked = torch.stack(ws).npu()
        bare = torch.cat([_product(a, w) for a, w in zip(parts, ws, strict=True)])
        close(gmm([nx], [stacked], group_list=totals, group_type=0, split_item=3), [bare])
        swapped = stacked.transpose(1, 2).contiguous().transpose(1, 2)
        close(gmm([nx], [swapped], group_list=totals, group_type=0, split_item=2), [bare])
        cube = torch.randn(2, 3, 5).to(dtype)
        close(gmm([cube.npu()], [nws[0]], group_type=-1), [_product(cube, ws[0])])
        across = x.t().contiguous()  # groups of columns, and of the rows of the weight
        tall = torch.randn(7, 4).to(dtype)
        along_k = torch.stack([_product(a.t(), b) for a, b in zip(parts, tall.split(rows), strict=True)])
        for columns in (across.npu(), nx.t()):
            close(gmm([columns], [tall.npu()], group_list=totals, group_type=2, split_item=3), [along_k])
        close(gmm([nx], [nws[0]], scale=[], offset=[], antiquant_scale=[], bias=[]), [_product(x, ws[0])])
    x, w = torch.randn(4, 3).npu().requires_grad_(), torch.randn(2, 3, 2).npu().requires_grad_()
    torch_npu.npu_grouped_matmul([x], [w], group_list=[1, 4], split_item=3)[0].sum().backward()
    assert x.grad.shape == x.shape
    assert w.grad.shape == w.shape
    name, call = "torch_npu.npu_grouped_matmul", torch_npu.npu_grouped_matmul
    for options, mode in (
        ({"scale": [w]}, "(scale=…), its full quantization mode,"),
        ({"antiquant_scale": [w]}, "(antiquant_scale=…), its weight-only quantization mode,"),
        ({"per_token_scale": [w]}, "(per_token_scale=…), its per-token quantization mode,"),
        ({"act_type": 1}, "(act_type=1), an activation of per-token quantization,"),
        ({"group_list_type": 2}, "(group_list_type=2), a form of full quantization,"),
        ({"output_dtype": torch.int8}, "(output_dtype=torch.int8) for x of torch.float32"),
    ):
        expect(NotImplementedError, f"{name}{mode} is not emulated", call, [x], [w], group_list=[1, 4], **options)
    text = f"{name} with torch.int8, its quantized mode, is not emulated"
    expect(NotImplementedError, text, call, [x.to(torch.int8)], [w.to(torch.int8)], group_list=[1, 4])
    for options, text in (
        ({"group_list": [1, 3]}, "'group_list' is about 3 rows, x has 4"),
        ({"group_list": [3, 1]}, "must not decrease"),
        ({"group_list": [1, 2, 4]}, "needs a 'group_list' of as many, got 3 numbers"),
        ({"split_item": 5}, "The given split_item [5] is invalid, which must be one of 0/1/2/3"),
        ({"group_list": [1, 4], "bias": [w[0, 0]]}, "Expected as many biases as weights (2), got 1"),
        ({"group_list": [1, 3], "group_type": 2}, "group_type 2 takes one x, one weight, no bias, and split_item 2"),
        ({"group_list": [1, 3], "group_type": 2, "split_item": 3}, "needs x [M, K], weight [K, N] and a 'group_list'"),
    ):
        expect(RuntimeError, text, call, [x], [w], **options)
    expect(RuntimeError, "Neither x nor weight could be empty.", call, [], [])


def gmm():
    from mindspeed.ops.gmm import npu_gmm, npu_gmm_v2

    torch.manual_seed(5)
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(6, 4).to(dtype).npu().requires_grad_()
        w = torch.randn(3, 4, 5).to(dtype).npu().requires_grad_()
        want = torch.cat(
            [_product(a, b) for a, b in zip(x.detach().cpu().split([1, 3, 2]), w.detach().cpu(), strict=True)]
        )
        for y in (
            npu_gmm(x, w, bias=None, group_list=[1, 4, 6], group_type=0),
            npu_gmm(x, w, group_list=torch.tensor([1, 4, 6]).npu()),
            npu_gmm_v2(x, w, group_list=torch.tensor([1, 3, 2]).npu()),
        ):
            torch.testing.assert_close(y.detach().cpu().double(), want, rtol=torch.finfo(dtype).eps, atol=1e-5)
            assert y.dtype is dtype
        y.sum().backward()
        ones = torch.ones(6, 5)
        grads = [g @ b.float().t() for g, b in zip(ones.split([1, 3, 2]), w.detach().cpu(), strict=True)]
        torch.testing.assert_close(x.grad.cpu().float(), torch.cat(grads), rtol=1e-2, atol=1e-2)
        wide = torch.randn(6, 3).to(dtype).npu().requires_grad_()
        y = npu_gmm(x.t(), wide, group_list=[1, 4, 6], group_type=2)
        pairs = zip(x.detach().cpu().split([1, 3, 2]), wide.detach().cpu().split([1, 3, 2]), strict=True)
        want = torch.stack([_product(a.t(), b) for a, b in pairs])
        torch.testing.assert_close(y.detach().cpu().double(), want, rtol=torch.finfo(dtype).eps, atol=1e-5)
        y.sum().backward()
        assert wide.grad.shape == wide.shape
    expect(NotImplementedError, "npu_gmm(group_type=1) is not emulated", npu_gmm, x, w, group_list=[6], group_type=1)
    expect(NotImplementedError, "with torch.int8, its quantized mode", npu_gmm, x.to(torch.int8), w, group_list=[6])
    expect(TypeError, "'group_list' must be a torch.Tensor, got list", npu_gmm_v2, x, w, group_list=[1, 3, 2])
    expect(ValueError, "needs a group_list and a weight [E, K, N]", npu_gmm, x, w)


PROBES = [
    the_module, streams_and_events, memory_figures, missing_names, settings_that_change_nothing_say_so, grouped_matmul,
    gmm,
]  # fmt: skip
