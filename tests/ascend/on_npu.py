"""What a script may expect of npu tensors, one function each; they run in a rank where unisono.ascend is installed."""

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
    x[2:].view(-1)[1] = c[2:].view(-1)[1] = 4
    x[2:].unflatten(1, (2, 3))[1, 1] += 1
    c[2:].unflatten(1, (2, 3))[1, 1] += 1
    same(x, c)
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


def what_torch_cannot_put_on_an_accelerator():
    text = "the operator aten::quantize_per_tensor on npu, which gives quantized tensors, is not emulated"
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expect(NotImplementedError, text, torch.quantize_per_tensor, torch.ones(2, device="npu"), 0.1, 0, torch.qint8)
    expect(RuntimeError, "only dense CPU tensors can be pinned", torch.ones(2, device="npu").pin_memory)
    expect(NotImplementedError, "from 4 to 8 bytes", torch.ones(1, device="npu").untyped_storage().resize_, 8)


PROBES = [
    device_of_a_moved_tensor, factories, second_device, mixing_devices_is_an_error, copies, dtypes, shapes,
    operators_equal_the_cpu, views_share_memory, resizing, random_numbers, what_torch_cannot_put_on_an_accelerator,
]  # fmt: skip
