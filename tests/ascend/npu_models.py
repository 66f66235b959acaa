"""Models on npu: what a training script may expect, one function each; see on_npu.py."""

import copy
import io
import pickle
import threading

import torch
import torch.nn.functional as F
from torch import nn

from .on_npu import expect, same


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


def compiled():
    for backend in ("eager", "aot_eager"):
        model, twin = _model().npu(), _model()
        x = torch.ones(2, 5)
        torch.compile(model, backend=backend)(x.npu()).sum().backward()
        twin(x).sum().backward()
        for a, b in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(a.grad.cpu(), b.grad, rtol=1e-5, atol=1e-6)


PROBES = [
    optimizers_equal_the_cpu, autograd, save_and_load, modules, autocast, data_loader, compiled,
]  # fmt: skip
