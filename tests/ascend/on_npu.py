"""What a script may expect of npu tensors, one function each; they run in a rank where unisono.ascend is installed."""

import copy
import io
import pickle
import threading

import torch
import torch.nn.functional as F
from torch import nn


def expect(kind, text, function, *args, **kwargs):
    try:
        function(*args, **kwargs)
    except kind as error:
        assert text in str(error), str(error)
    else:
        raise AssertionError(f"no {kind.__name__}")


def same(npu, cpu):
    assert npu.device.type == "npu", npu.device
    assert cpu.device.type == "cpu"
    torch.testing.assert_close(npu.cpu(), cpu, rtol=0, atol=0, equal_nan=True)


# -- where tensors are


def device_of_a_moved_tensor():
    x = torch.arange(4)
    for y in (x.npu(), x.to("npu"), x.to("npu:0"), x.to(torch.device("npu")), x.to(device="npu"), x.npu(0)):
        assert y.device == torch.device("npu:0")
        assert y.is_npu
        assert not y.is_cpu
        assert type(y) is torch.Tensor
        assert y.type() == "torch.npu.LongTensor"
        same(y, x)
    assert not x.is_npu
    y = x.npu()
    assert y.npu() is y
    assert y.to("npu") is y
    assert y.get_device() == 0


def factories():
    same(torch.zeros(2, 3, device="npu"), torch.zeros(2, 3))
    same(torch.ones(2, device="npu:0", dtype=torch.int32), torch.ones(2, dtype=torch.int32))
    same(torch.full((2,), 7.0, device=torch.device("npu")), torch.full((2,), 7.0))
    same(torch.arange(5, device="npu"), torch.arange(5))
    same(torch.linspace(0, 1, 5, device="npu"), torch.linspace(0, 1, 5))
    same(torch.eye(3, device="npu"), torch.eye(3))
    same(torch.tensor([1.0, 2.0], device="npu"), torch.tensor([1.0, 2.0]))
    same(torch.as_tensor([1, 2], device="npu"), torch.tensor([1, 2]))
    assert torch.empty(2, 3, device="npu").shape == (2, 3)
    x = torch.ones(2, device="npu")
    for made in (torch.zeros_like(x), x.new_zeros(2), torch.empty_like(x), x.new_tensor([1.0]), torch.rand_like(x)):
        assert made.device == x.device
    with torch.device("npu"):
        assert torch.zeros(1).device.type == "npu"
        assert torch.tensor([1]).device.type == "npu"


def second_device():
    torch.npu.set_device(1)
    try:
        for x in (
            torch.zeros(2, device="npu"),
            torch.ones(2).npu(),
            torch.ones(2).to("npu"),
            torch.tensor([1.0], device="npu"),
            nn.Linear(2, 2).to("npu").weight,
            nn.Linear(2, 2).npu().weight,
        ):
            assert x.device == torch.device("npu:1"), x.device
        x = torch.ones(2, device="npu", requires_grad=True)
        (x * x).sum().backward()
        assert x.grad.device == torch.device("npu:1")
        assert torch.npu.current_device() == 1
        with torch.npu.device(0):
            assert torch.zeros(1, device="npu").device.index == 0
        assert torch.npu.current_device() == 1
        expect(RuntimeError, "npu:1 and npu:0", torch.add, x, torch.ones(2, device="npu:0"))
        same(x.to("npu:0"), torch.ones(2))
    finally:
        torch.npu.set_device(0)
    expect(RuntimeError, "Expected a device from npu:0 to", torch.npu.set_device, torch.npu.device_count())


def mixing_devices_is_an_error():
    x, c = torch.ones(2, 2, device="npu"), torch.ones(2, 2)
    text = "Expected all tensors to be on the same device, but found at least two devices"
    expect(RuntimeError, text, torch.add, x, c)
    expect(RuntimeError, text, torch.matmul, c, x)
    expect(RuntimeError, text, c.add_, x)
    expect(RuntimeError, text, torch.cat, [x, c])
    expect(RuntimeError, text, F.linear, x, c)
    same(x + torch.tensor(1.0), torch.full((2, 2), 2.0))
    same(x[torch.tensor([0])], c[:1])
    expect(TypeError, "can't convert npu:0 device type tensor to numpy", x.numpy)


def copies():
    c = torch.randn(3, 4)
    x = torch.empty(3, 4, device="npu")
    x.copy_(c, non_blocking=True)
    same(x, c)
    back = torch.empty(3, 4)
    back.copy_(x)
    assert torch.equal(back, c)
    x.zero_()
    assert torch.equal(back, c)
    assert not c.eq(0).all()
    same(torch.ones(4, 3, device="npu").t().copy_(c), c)
    same(c.npu().half(), c.half())
    same(c.to("npu", torch.bfloat16), c.bfloat16())
    same(torch.empty(2, 4, device="npu").copy_(c[0]), c[0].expand(2, 4))


def dtypes():
    for dtype in (
        torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.int16, torch.int32, torch.int64,
        torch.uint8, torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.uint16,
    ):  # fmt: skip
        c = torch.arange(6).reshape(2, 3).to(dtype)
        x = c.npu()
        assert x.dtype is dtype
        assert torch.equal(x.cpu().view(torch.uint8), c.view(torch.uint8))
    z = torch.tensor([1 + 2j, 3 - 1j]).npu()
    same(z.conj() * z, z.cpu().conj() * z.cpu())
    same(torch.view_as_real(z), torch.view_as_real(z.cpu()))
    same(z.imag, z.cpu().imag)


def shapes():
    for shape in ((), (0,), (0, 3), (1, 3), (2, 1, 3)):
        c = torch.ones(shape)
        x = c.npu()
        assert x.shape == c.shape
        assert x.stride() == c.stride()
        same(x + x, c + c)
    assert torch.tensor(3.5, device="npu").item() == 3.5
    assert float(torch.ones((), device="npu")) == 1.0
    assert torch.ones(2, device="npu").tolist() == [1.0, 1.0]


# -- operators


def operators_equal_the_cpu():
    torch.manual_seed(0)
    a, b, i = torch.randn(4, 5), torch.randn(5, 6), torch.randint(0, 4, (3,))
    functions = [
        lambda a, b, i: a @ b,
        lambda a, b, i: torch.softmax(a, -1),
        lambda a, b, i: a.sum(0),
        lambda a, b, i: a.mean(),
        lambda a, b, i: a.max(1).values,
        lambda a, b, i: a.sort(1).indices,
        lambda a, b, i: a.topk(2).values,
        lambda a, b, i: torch.where(a > 0, a, -a),
        lambda a, b, i: a[i],
        lambda a, b, i: a[a > 0],
        lambda a, b, i: torch.cat([a, a], 1),
        lambda a, b, i: torch.stack([a, a]),
        lambda a, b, i: torch.einsum("ij,jk->ki", a, b),
        lambda a, b, i: F.layer_norm(a, (5,)),
        lambda a, b, i: F.gelu(a),
        lambda a, b, i: F.cross_entropy(a, torch.zeros(4, dtype=torch.long, device=a.device)),
        lambda a, b, i: F.embedding(i, a),
        lambda a, b, i: F.conv2d(a.reshape(1, 1, 4, 5), b[:3, :3].reshape(1, 1, 3, 3)),
        lambda a, b, i: F.scaled_dot_product_attention(a[None], a[None], a[None]),
        lambda a, b, i: a.index_add(0, i, a[:3]),
        lambda a, b, i: a.scatter(0, i[None].expand(2, 3), 1.0),
        lambda a, b, i: a.cumsum(1),
        lambda a, b, i: torch.linalg.svd(a).S,
        lambda a, b, i: torch.fft.fft(a).real,
        lambda a, b, i: a.std(dim=1),
        lambda a, b, i: torch.nonzero(a > 0),
        lambda a, b, i: a.unique(),
        lambda a, b, i: torch.tril(a),
        lambda a, b, i: a.masked_fill(a > 0, 2.0),
        lambda a, b, i: torch.bincount(i),
        lambda a, b, i: a.clone().clamp_(-0.5, 0.5),
        lambda a, b, i: torch.nn.utils.rnn.pad_sequence([a, a[:2]]),
        lambda a, b, i: torch.add(a, a, out=torch.empty(0, device=a.device)),
        lambda a, b, i: torch.stack(torch._foreach_add([a, a], 1.0)),
        lambda a, b, i: a.double().round(decimals=1),
    ]  # fmt: skip
    for number, function in enumerate(functions):
        npu, cpu = function(a.npu(), b.npu(), i.npu()), function(a, b, i)
        assert npu.device.type == "npu", number
        torch.testing.assert_close(npu.cpu(), cpu, rtol=0, atol=0, msg=f"function {number}")


def views_share_memory():
    x = torch.zeros(4, 6, device="npu")
    x[1:3, ::2] += 1
    x.t()[0, 0] = 5
    x.view(-1)[-1] = 7
    x.view(2, 12)[0].unfold(0, 2, 5)[0] += 1
    x.split(2)[1].diagonal().fill_(9)
    x.narrow(0, 0, 1).unsqueeze(0).squeeze(0).select(1, 3).mul_(2).add_(1)
    c = torch.zeros(4, 6)
    c[1:3, ::2] += 1
    c.t()[0, 0] = 5
    c.view(-1)[-1] = 7
    c.view(2, 12)[0].unfold(0, 2, 5)[0] += 1
    c.split(2)[1].diagonal().fill_(9)
    c.narrow(0, 0, 1).unsqueeze(0).squeeze(0).select(1, 3).mul_(2).add_(1)
    same(x, c)
    y = x[1:]
    assert y._base is None or y._base is x
    assert y.storage_offset() == 6
    assert y.data_ptr() == x.data_ptr() + 24
    assert y.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    assert x.as_strided((2,), (6,), 1).tolist() == c.as_strided((2,), (6,), 1).tolist()
    same(x.view(torch.int32), c.view(torch.int32))
    expect(RuntimeError, "view size is not compatible", x.t().view, -1)


def resizing():
    x = torch.arange(4.0, device="npu")
    x.resize_(2)
    assert x.tolist() == [0.0, 1.0]
    x.resize_(3, 5)
    assert x.shape == (3, 5)
    x.fill_(1)
    assert x.sum().item() == 15
    y = torch.empty(0, device="npu")
    y.set_(x)
    same(y, torch.ones(3, 5))
    y[0] = 2
    assert x[0, 0].item() == 2


def random_numbers():
    torch.manual_seed(7)
    a, ca = torch.randn(3, device="npu"), torch.randn(3)
    torch.manual_seed(7)
    cb, b = torch.randn(3), torch.randn(3, device="npu")  # independent of the CPU's
    same(a, b.cpu())
    assert torch.equal(ca, cb)
    torch.npu.manual_seed(3)
    state = torch.npu.get_rng_state()
    a = torch.rand(2, device="npu")
    torch.npu.set_rng_state(state)
    same(torch.rand(2, device="npu"), a.cpu())
    assert torch.npu.initial_seed() == 3
    g = torch.Generator(device="npu").manual_seed(5)
    assert g.device.type == "npu"
    assert isinstance(g, torch.Generator)
    a = torch.rand(2, device="npu", generator=g)
    g.manual_seed(5)
    same(torch.empty(2, device="npu").uniform_(generator=g), a.cpu())
    assert isinstance(torch.default_generator, torch.Generator)
    assert torch.Generator().device.type == "cpu"
    kept = F.dropout(torch.ones(1000, device="npu"), 0.5).count_nonzero().item()
    assert 300 < kept < 700
    assert sorted(torch.randperm(5, device="npu").tolist()) == [0, 1, 2, 3, 4]


# -- models


def _model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 8), nn.LayerNorm(8), nn.ReLU(), nn.Dropout(0.0), nn.Linear(8, 3))


def optimizers_equal_the_cpu():
    for make in (
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.AdamW(p, lr=0.01),
        lambda p: torch.optim.Adam(p, lr=0.01, foreach=True),
        lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    ):
        on_cpu, on_npu = _model(), _model().npu()
        assert next(on_npu.parameters()).device.type == "npu"
        assert type(next(on_npu.parameters())) is nn.Parameter
        torch.manual_seed(2)
        batches = [(torch.randn(4, 5), torch.randint(0, 3, (4,))) for _ in range(3)]
        for model in (on_cpu, on_npu):
            optimizer = make(model.parameters())
            for x, y in batches:
                device = next(model.parameters()).device
                loss = F.cross_entropy(model(x.to(device)), y.to(device))
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
        for a, b in zip(on_npu.parameters(), on_cpu.parameters(), strict=True):
            torch.testing.assert_close(a.detach().cpu(), b.detach(), rtol=0, atol=0)


def autograd():
    x = torch.randn(3, 4, requires_grad=True)
    y = x.npu()
    y.retain_grad()
    (y[1:] * y[:2]).sum().backward()
    assert x.grad.device.type == "cpu"
    assert y.grad.device.type == "npu"
    z = x.detach().clone().requires_grad_()
    (z[1:] * z[:2]).sum().backward()
    torch.testing.assert_close(x.grad, z.grad, rtol=0, atol=0)

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            assert ctx.saved_tensors[0].device.type == "npu"
            return grad * 2

    w = torch.ones(2, device="npu", requires_grad=True)
    (grad,) = torch.autograd.grad(Double.apply(w).pow(2).sum(), w, create_graph=True)
    grad.sum().backward()
    same(w.grad, torch.full((2,), 8.0))
    u = torch.ones(2, device="npu", requires_grad=True)
    v = u * 1
    v[0] = 5
    v.sum().backward()
    same(u.grad, torch.tensor([0.0, 1.0]))
    old = torch.ones(2, device="npu", requires_grad=True)
    with torch.no_grad():
        old += 1
    expect(RuntimeError, "a leaf Variable that requires grad", old.add_, 1)
    p = torch.ones(2, device="npu", requires_grad=True)
    q = p * p
    saved = q.exp()
    saved.add_(1)
    expect(RuntimeError, "modified by an inplace operation", saved.sum().backward)
    x = torch.ones(2, 2, device="npu", requires_grad=True)
    torch.utils.checkpoint.checkpoint(lambda x: (x @ x).relu(), x, use_reentrant=False).sum().backward()
    same(x.grad, torch.full((2, 2), 4.0))
    grads = []
    thread = threading.Thread(target=lambda: grads.append(torch.autograd.grad((x * 2).sum(), x)[0]))
    thread.start()
    thread.join()
    same(grads[0], torch.full((2, 2), 2.0))


def save_and_load():
    model = _model().npu()
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "step": torch.tensor(3, device="npu:1")}, file)
    for where, device in ((None, "npu"), ("cpu", "cpu"), ("npu:0", "npu"), ("npu", "npu")):
        file.seek(0)
        loaded = torch.load(file, map_location=where)
        assert loaded["step"].device.type == device
        if where is None:
            assert loaded["step"].device.index == 1
        for name, value in model.state_dict().items():
            assert loaded["model"][name].device.type == device
            torch.testing.assert_close(loaded["model"][name].cpu(), value.cpu(), rtol=0, atol=0)
    other = _model().npu()
    other.load_state_dict(loaded["model"])
    cpu = _model()
    cpu.load_state_dict(loaded["model"])
    assert next(cpu.parameters()).device.type == "cpu"
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin[0].weight.zero_()
    assert model[0].weight.abs().sum().item() > 0
    assert twin[0].weight.device.type == "npu"
    same(pickle.loads(pickle.dumps(torch.ones(3).npu()[1:])), torch.ones(2))
    x = torch.ones(2, device="npu")
    a, b = copy.deepcopy([x, x])
    assert a is b


def modules():
    model = nn.Sequential(nn.Embedding(10, 8), nn.TransformerEncoderLayer(8, 2, 16, batch_first=True))
    cpu = copy.deepcopy(model)
    npu = model.npu()
    tokens = torch.arange(6).reshape(2, 3)
    torch.manual_seed(0)
    model.eval(), cpu.eval()
    # Attention runs as torch composes it, on the CPU as one kernel: the last bits differ.
    torch.testing.assert_close(npu(tokens.npu()).detach().cpu(), cpu(tokens).detach(), rtol=1e-5, atol=1e-6)
    for kind in (nn.LSTM, nn.GRU, nn.RNN):
        for bias in (True, False):
            layer = kind(3, 4, num_layers=2, bias=bias)
            twin = copy.deepcopy(layer).npu()
            x = torch.randn(5, 2, 3)
            layer(x)[0].pow(2).sum().backward()
            twin(x.npu())[0].pow(2).sum().backward()
            for a, b in zip(twin.parameters(), layer.parameters(), strict=True):
                torch.testing.assert_close(a.grad.cpu(), b.grad, rtol=1e-4, atol=1e-5)
    norm = nn.BatchNorm1d(3).npu()
    norm(torch.randn(4, 3, device="npu"))
    assert norm.num_batches_tracked.item() == 1
    torch.func.functional_call(npu, dict(npu.named_parameters()), (tokens.npu(),))
    model.cpu()
    assert next(model.parameters()).device.type == "cpu"
    half = nn.Linear(2, 2).npu().half()
    assert half(torch.ones(1, 2, device="npu", dtype=torch.half)).dtype is torch.half
    per_sample = torch.func.vmap(torch.func.grad(lambda x: (x * x).sum()))(torch.ones(3, 2, device="npu"))
    same(per_sample, torch.full((3, 2), 2.0))


def autocast():
    model = _model().npu()
    x = torch.randn(4, 5, device="npu")
    for context in (
        torch.autocast("npu", dtype=torch.bfloat16),
        torch.npu.amp.autocast(dtype=torch.bfloat16),
        torch.amp.autocast(device_type="npu", dtype=torch.bfloat16),
    ):
        with context:
            assert torch.is_autocast_enabled("npu")
            assert (x @ x.t()).dtype is torch.bfloat16
            assert F.linear(x, model[0].weight).dtype is torch.bfloat16
            assert (x + 1).dtype is torch.float32
            assert torch.softmax((x @ x.t()), -1).dtype is torch.float32
            assert F.mse_loss(x.half(), x.half()).dtype is torch.float32
            assert torch.cat([x, x.half()]).dtype is torch.float32
            with torch.autocast("npu", enabled=False):
                assert (x @ x.t()).dtype is torch.float32
            expect(RuntimeError, "unsafe to autocast", F.binary_cross_entropy, x.sigmoid(), x.sigmoid())
    assert (x @ x.t()).dtype is torch.float32
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for scaler in (torch.npu.amp.GradScaler(init_scale=8.0), torch.amp.GradScaler("npu", init_scale=8.0)):
        before = model[0].weight.detach().cpu()
        with torch.autocast("npu", dtype=torch.float16):
            loss = model(x).float().pow(2).mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert not torch.equal(before, model[0].weight.detach().cpu())
        scaler.scale(torch.ones((), device="npu", requires_grad=True) * float("inf")).backward()


def data_loader():
    data = torch.utils.data.TensorDataset(torch.arange(8.0), torch.arange(8))
    loader = torch.utils.data.DataLoader(data, batch_size=4, pin_memory=True)
    seen = []
    for x, y in loader:
        assert x.is_pinned()
        x, y = x.npu(non_blocking=True), y.to("npu", non_blocking=True)
        seen += (x + y).tolist()
    assert seen == [2.0 * i for i in range(8)]
    assert not torch.ones(1).is_pinned()


# -- torch.npu


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
    import gc

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
    import warnings

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


PROBES = [
    device_of_a_moved_tensor, factories, second_device, mixing_devices_is_an_error, copies, dtypes, shapes,
    operators_equal_the_cpu, views_share_memory, resizing, random_numbers, optimizers_equal_the_cpu, autograd,
    save_and_load, modules, autocast, data_loader, the_module, streams_and_events, memory_figures, missing_names,
    settings_that_change_nothing_say_so,
]  # fmt: skip
